"""Page: runs with their stages, times and outcomes, and who is champion of each model."""

from collections.abc import Iterator, Mapping, Sequence

from dashboards.app.choosing import FindServices, lineage_link, mlflow_link, short_id
from dashboards.app.content import Nothing, Page
from dashboards.app.records import Records, Row
from dashboards.app.selection import Selection
from dashboards.figures.drawing import Figure, new_drawing
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
        find_services: tells which other pages runs can link to.
        selection: its choices.

    Raises:
        Nothing: nothing has run yet.
    """
    runs = records.runs()
    if not runs:
        raise Nothing("Nothing has run in this home yet.", "kvp run --preset smoke")
    stages = dict.fromkeys(run["stage"] for run in reversed(runs))
    stage = selection.one("stage", "Stage", [_ALL, *((name, name) for name in stages)])
    outcomes = sorted({run["outcome"] for run in runs})
    outcome = selection.one("outcome", "Outcome", [_ALL, *((name, name) for name in outcomes)])
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
    least = max(span.total_seconds() / 300, 0.01)  # what took no time at all is seen as well
    for outcome in dict.fromkeys(run["outcome"] for run in runs):
        alike = [run for run in runs if run["outcome"] == outcome]
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
    ordered = sorted(runs, key=lambda run: run["started_at"])
    return list(dict.fromkeys(run["stage"] for run in ordered))[::-1]


def _runs_table(runs: Sequence[Row], services: Mapping[str, str]) -> Table:
    columns = ["started", "stage", "outcome", "time", "record and lineage", "elsewhere", "seed", "commit"]
    rows: list[list[Cell]] = [
        [
            f"{run['started_at']:%Y-%m-%d %H:%M:%S}",
            run["stage"],
            Outcome(name=run["outcome"], reason=_reason(run)),
            duration(run["seconds"]),
            lineage_link(run["run_id"]),
            list(_service_links(run, services)),
            "" if run["seed"] is None else str(run["seed"]),
            f"{run['git_commit'][:8]}{'*' if run['git_dirty'] else ''}",
        ]
        for run in runs
    ]
    filled = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    return table(
        "",
        [columns[place] for place in filled],
        [[row[place] for place in filled] for row in rows],
        numeric={3},
    )


def _reason(run: Row) -> str | Link:
    """What stands below an outcome: why a run failed, or which one it stands on or repeats."""
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
    for stage in dict.fromkeys(run["stage"] for run in reversed(runs)):
        alike = [run for run in runs if run["stage"] == stage]
        counts = [sum(run["outcome"] == outcome for run in alike) for outcome in outcomes]
        done = [run["seconds"] for run in alike if run["outcome"] == "completed"]
        mean = duration(sum(done) / len(done)) if done else "–"
        rows.append([stage, *map(str, counts), mean, duration(sum(run["seconds"] for run in alike))])
    columns = ["stage", *outcomes, "mean time", "time in all"]
    return table("Stages", columns, rows)


def _champions(records: Records) -> Table | None:
    by_model: dict[str, list[Row]] = {}
    for row in records.decisions():
        by_model.setdefault(row["model_digest"], []).append(row)
    if not by_model:
        return None
    rows: list[list[Cell]] = []
    for digest, decisions in by_model.items():
        history = PromotionHistory(rows=decisions)
        name = records.models().get(digest, {}).get("name", digest[:8])
        since = next(row for row in reversed(decisions) if row["decision"] == PROMOTED or row is decisions[0])
        last = decisions[-1]
        rows.append(
            [
                name,
                _policy_link(history.champion),
                moment(since["created_at"]),
                _policy_link(history.challenger),
                _difference(last),
                ", ".join(filter(None, [f"{last['kind']}: {last['decision']}", last["reason"]])),
            ]
        )
    return table(
        "Champions",
        ["model", "champion", "since", "last challenger", "KL difference", "last decision"],
        rows,
        long={5},
        numeric=(),
    )


def _decisions(records: Records) -> Table | None:
    """Every challenger and what was decided, the newest first."""
    rows: list[list[Cell]] = [
        [
            moment(row["created_at"]),
            records.models().get(row["model_digest"], {}).get("name", row["model_digest"][:8]),
            _policy_link(row["challenger_id"]),
            _policy_link(row["champion_before_id"]),
            f"{row['kind']}: {row['decision']}",
            _difference(row),
            lineage_link(row["evaluation_id"], "evaluation") if row["evaluation_id"] else "",
            row["reason"],
        ]
        for row in reversed(records.decisions())
    ]
    columns = ["when", "model", "challenger", "champion then", "decision", "KL difference", "judged by", "why"]
    return table("Challengers", columns, rows, long={7}, folded=True, numeric=()) if rows else None


def _difference(decision: Row) -> str:
    """Challenger minus champion, with its interval."""
    ends = (decision["ci_low"], decision["ci_high"])
    return number(decision["difference"]) if ends[0] is None else with_interval(decision["difference"], *ends)


def _policy_link(policy_set_id: str) -> Cell:
    return lineage_link(policy_set_id, f"policy set {short_id(policy_set_id)}") if policy_set_id else "–"
