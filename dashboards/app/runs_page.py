"""Page: runs with their stages, times and outcomes, and who is champion of each model."""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

from dashboards.app.choosing import FindServices, lineage_link, mlflow_link, short_id
from dashboards.app.content import Nothing, Page
from dashboards.app.records import Records, Row
from dashboards.app.selection import Selection
from dashboards.figures.drawing import Figure, new_drawing
from dashboards.grouping import grouped
from dashboards.rendering.formats import duration, moment, number, with_interval
from dashboards.rendering.table import Cell, Link, Outcome, Table, table
from storage.catalog.promotions import PROMOTED, PromotionHistory

_PER_PAGE = 50
_ALL = ("", "all")
_COLOURS = {"completed": "#2e8b57", "failed": "#c62828", "skipped": "#9aa5b1", "repeated": "#7a6fbe"}


def runs_page(records: Records, find_services: FindServices, selection: Selection) -> Page:
    """The page.

    Args:
        records: of the home.
        find_services: gives the services whose pages runs can link to.
        selection: its choices.

    Raises:
        Nothing: nothing has run yet.
    """
    runs = records.runs()
    if not runs:
        raise Nothing("Nothing has run in this home yet.", "kvp run --preset smoke")
    stage = selection.one("stage", "Stage", [_ALL, *dict.fromkeys(run["stage"] for run in reversed(runs))])
    outcome = selection.one("outcome", "Outcome", [_ALL, *sorted({run["outcome"] for run in runs})])
    wanted = [run for run in runs if stage in ("", run["stage"]) and outcome in ("", run["outcome"])]
    num_pages = max(1, -(-len(wanted) // _PER_PAGE))
    page = selection.number("page", default=1, least=1, most=num_pages)
    shown = wanted[(page - 1) * _PER_PAGE : page * _PER_PAGE]
    services = find_services()
    return Page(
        template="runs.html",
        content={
            "title": "Runs",
            "lead": f"{len(runs):,} runs, newest first. Times are in UTC.",
            "champions": _champions(records),
            "decisions": _decisions(records),
            "timeline": _timeline(shown) if shown else None,
            "runs": _runs_table(shown, services),
            "stages": _stage_table(runs),
            "services": _service_note(services),
            "page": page,
            "num_pages": num_pages,
            "newer": selection.url("runs", page=page - 1) if page > 1 else "",
            "older": selection.url("runs", page=page + 1) if page < num_pages else "",
        },
    )


def _timeline(runs: Sequence[Row]) -> Figure:
    drawing = new_drawing(
        barmode="overlay",
        bargap=0.35,
        legend_above=True,
        xaxis={"type": "date"},
        yaxis={"automargin": True, "categoryorder": "array", "categoryarray": _stages_by_start(runs)},
    )
    drawing.update_layout(margin={"b": 36})
    span = max(run["ended_at"] for run in runs) - min(run["started_at"] for run in runs)
    least = max(span.total_seconds() / 300, 0.01)  # keeps runs of no time visible
    for outcome, alike in grouped(runs, itemgetter("outcome")).items():
        drawing.add_bar(
            name=outcome,
            orientation="h",
            base=[run["started_at"].isoformat() for run in alike],
            x=[max(run["seconds"], least) * 1000 for run in alike],
            y=[run["stage"] for run in alike],
            customdata=[[run["run_id"], f"{run['seconds']:.1f}"] for run in alike],
            hovertemplate="%{customdata[0]}<br>%{customdata[1]} s<extra>%{fullData.name}</extra>",
            marker={"color": _COLOURS.get(outcome, "#44505e"), "line": {"width": 1, "color": "#fff"}},
            opacity=0.85,
        )
    num_stages = len({run["stage"] for run in runs})
    return Figure(
        name="timeline",
        title="When they ran",
        drawing=drawing,
        label=f"Bars in time, one for each of {len(runs)} runs, in {num_stages} stages.",
        height=110 + 26 * num_stages,
        note="The runs of the list below; a click shows a run's lineage.",
        choice="lineage:id",
    )


def _stages_by_start(runs: Sequence[Row]) -> list[str]:
    """Stages from bottom to top: the last that began first."""
    return list(grouped(sorted(runs, key=itemgetter("started_at")), itemgetter("stage")))[::-1]


def _runs_table(runs: Sequence[Row], services: Mapping[str, str]) -> Table:
    rows: list[dict[str, Cell]] = [
        {
            "started": f"{run['started_at']:%Y-%m-%d %H:%M:%S}",
            "stage": run["stage"],
            "outcome": Outcome(name=run["outcome"], reason=_reason(run)),
            "time": duration(run["seconds"]),
            "record and lineage": lineage_link(run["run_id"]),
            "elsewhere": list(_service_links(run, services)),
            "seed": "" if run["seed"] is None else str(run["seed"]),
            "commit": f"{run['git_commit'][:8]}{'*' if run['git_dirty'] else ''}",
        }
        for run in runs
    ]
    filled = [name for name in next(iter(rows), {}) if any(row[name] for row in rows)]
    return table("", filled, [[row[name] for name in filled] for row in rows], numeric={3})


def _reason(run: Row) -> str | Link:
    """Text below an outcome: the reason of a failure, or the run that was reused or repeated."""
    if run["reused_run_id"]:
        return lineage_link(run["reused_run_id"], f"as {run['reused_run_id'][:10]}…")
    return str(run["reason"])


def _service_links(run: Row, services: Mapping[str, str]) -> Iterator[Link]:
    if "prefect" in services:
        for kind in ("flow", "task"):
            if name := run[f"prefect_{kind}_run_id"]:
                yield Link(text=f"Prefect {kind}", url=f"{services['prefect']}/runs/{kind}-run/{name}")
    if link := mlflow_link(services, run["mlflow_run_id"]):
        yield link


def _service_note(services: Mapping[str, str]) -> str:
    missing = [words for name, words in {"prefect": "Prefect", "mlflow": "MLflow"}.items() if name not in services]
    if not missing:
        return ""
    return f"{' and '.join(missing)} not running: `kvp up` starts the services, and runs then link into their pages."


def _stage_table(runs: Sequence[Row]) -> Table:
    outcomes = [name for name in _COLOURS if any(run["outcome"] == name for run in runs)]
    rows: list[list[Cell]] = []
    for stage, alike in grouped(reversed(runs), itemgetter("stage")).items():
        counts = [sum(run["outcome"] == outcome for run in alike) for outcome in outcomes]
        done = [run["seconds"] for run in alike if run["outcome"] == "completed"]
        mean = duration(sum(done) / len(done)) if done else "–"
        rows.append([stage, *map(str, counts), mean, duration(sum(run["seconds"] for run in alike))])
    columns = ["stage", *outcomes, "mean time", "time in all"]
    return table("Stages", columns, rows)


def _champions(records: Records) -> Table | None:
    rows: list[dict[str, Cell]] = []
    for digest, decisions in grouped(records.decisions(), itemgetter("model_digest")).items():
        history = PromotionHistory(rows=decisions)
        since = next(row for row in reversed(decisions) if row["decision"] == PROMOTED or row is decisions[0])
        last = decisions[-1]
        row: dict[str, Cell] = {
            "model": _model_name(records, digest),
            "champion": _policy_link(history.champion),
            "since": moment(since["created_at"]),
            "last challenger": _policy_link(history.challenger),
            "KL difference": _difference(last),
            "last decision": ", ".join(filter(None, [f"{last['kind']}: {last['decision']}", last["reason"]])),
        }
        rows.append(row)
    return table("Champions", rows[0], [row.values() for row in rows], long={5}, numeric=()) if rows else None


def _model_name(records: Records, digest: str) -> str:
    return str(records.models().get(digest, {}).get("name", digest[:8]))


def _decisions(records: Records) -> Table | None:
    """Every challenger with its decision, the newest first."""
    rows: list[dict[str, Cell]] = [
        {
            "when": moment(row["created_at"]),
            "model": _model_name(records, row["model_digest"]),
            "challenger": _policy_link(row["challenger_id"]),
            "champion then": _policy_link(row["champion_before_id"]),
            "decision": f"{row['kind']}: {row['decision']}",
            "KL difference": _difference(row),
            "evaluated by": lineage_link(row["evaluation_id"], "evaluation") if row["evaluation_id"] else "",
            "why": row["reason"],
        }
        for row in reversed(records.decisions())
    ]
    if not rows:
        return None
    return table("Challengers", rows[0], [row.values() for row in rows], long={7}, folded=True, numeric=())


def _difference(decision: Row) -> str:
    """Challenger minus champion, with its interval."""
    ends = (decision["ci_low"], decision["ci_high"])
    return number(decision["difference"]) if ends[0] is None else with_interval(decision["difference"], *ends)


def _policy_link(policy_set_id: str) -> Cell:
    return lineage_link(policy_set_id, f"policy set {short_id(policy_set_id)}") if policy_set_id else "–"
