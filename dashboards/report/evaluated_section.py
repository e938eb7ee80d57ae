"""Section: the evaluated methods, their samples, and their training."""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

from dashboards.figures.styles import method_order
from dashboards.grouping import Place, grouped, place_of
from dashboards.rendering.formats import NOTHING, counted, duration, listed, number
from dashboards.rendering.table import Table, table
from dashboards.report.document import Block, missing, prose
from dashboards.report.evaluation_rows import Training
from dashboards.report.view import ReportView, section, short
from storage.catalog.run_differences import flat
from storage.lineage.graph import LineageNode


@section("evaluated", "What was evaluated")
def evaluated_section(view: ReportView) -> Iterator[Block]:
    """Model, tasks, lengths, samples, seeds, budgets, settings, training and hardware."""
    yield prose("Everything below is computed from these samples, by this run, and from nothing else.")
    yield _setup(view)
    yield from _samples(view)
    yield from _skipped(view)
    yield _methods(view)
    yield from _trainings(view.rows.trainings)
    yield _parameters(view)


def _setup(view: ReportView) -> Table:
    run = view.rows.run.facts
    rows = [("evaluation", view.rows.evaluation.name)]
    rows += [("model", line) for line in _models(view)]
    rows += [("asked for", node.name) for node in view.rows.inputs(view.rows.run_id, "request")]
    rows += [(f"budgets, {short(place)}", _budgets(view, place)) for place in view.places]
    rows += [
        ("code", f"commit {run['git_commit'][:12] or 'unknown'}{', with changes' if run['git_dirty'] else ''}"),
        ("hardware", run["hardware"]),
        ("started (UTC)", str(run["started_at"])[:19]),
        ("time for all samples", _shard_seconds(view)),
        ("seed", str(run["seed"])),
    ]
    return table("The evaluation", ("what", "value"), rows, num_labels=2)


def _models(view: ReportView) -> Iterator[str]:
    for row in view.rows.models:
        shape = (
            f"{row['num_layers']} layers × {row['num_kv_heads']} KV heads ({row['num_query_heads']} query heads), head "
            f"dimension {row['head_dim']}, {row['max_positions']} positions"
        )
        revision = f" at {row['revision']}" if row["revision"] else ""
        yield f"{row['name']} ({row['source']}{revision}), {row['architecture']}: {shape}; digest {row['digest'][:16]}"
    if not view.rows.models:
        yield from (node.name for node in view.rows.inputs(view.rows.run_id, "model"))


def _budgets(view: ReportView, place: Place) -> str:
    budgets = sorted({row["budget"] for row in view.rows.curves if place_of(row) == place})
    shares = [view.share(place, budget) for budget in budgets]
    span = (
        "" if shares[0] is None or shares[-1] is None else f"; {shares[0]:.0%} to {shares[-1]:.0%} of the mean context"
    )
    return f"{', '.join(map(str, budgets))} tokens a KV head{span}"


def _shard_seconds(view: ReportView) -> str:
    shards = view.rows.input_ids([view.rows.run_id], "evaluation_shard")
    runs = {edge.source for edge in view.rows.graph.edges if edge.target in shards and edge.role == "output"}
    spent = sum(view.rows.graph.nodes[run].facts["seconds"] for run in runs)
    return f"{duration(spent)} in {counted(len(runs), 'part')}" if runs else NOTHING


def _samples(view: ReportView) -> Iterator[Block]:
    if not view.rows.samples:
        yield missing("rows of the samples that were evaluated", "`kvp evaluate` writes them with every shard.")
        return
    yield table(
        "Samples",
        ("benchmark", "task", "setting", "samples", "split", "context tokens", "question tokens", "answer tokens"),
        [
            (
                *key,
                str(len({row["sample_id"] for row in rows})),
                ", ".join(sorted({row["split"] for row in rows})),
                *(_span([row[f"{part}_tokens"] for row in rows]) for part in ("context", "question", "answer")),
            )
            for key, rows in sorted(grouped(view.rows.samples, itemgetter("benchmark", "task", "setting")).items())
        ],
        note="Tokens: smallest / mean / largest.",
        num_labels=3,
    )


def _span(counts: Sequence[int]) -> str:
    return f"{min(counts)} / {sum(counts) / len(counts):.0f} / {max(counts)}"


def _skipped(view: ReportView) -> Iterator[Block]:
    for node in view.rows.inputs(view.rows.run_id, "prompts"):
        yield prose(f"{node.id} ({node.name}): {skipped_words(node)}")


def skipped_words(prompts: LineageNode) -> str:
    """How many samples a prompt set left out or changed, and why."""
    reported: Mapping[str, int] = prompts.facts["metadata"]["reported"]
    if not reported:
        return "no sample was left out."
    reasons = listed(f"{count} ({reason})" for reason, count in sorted(reported.items()))
    return f"{sum(reported.values())} not taken or not as asked for: {reasons}."


def _methods(view: ReportView) -> Table:
    curves = sorted(view.rows.curves, key=lambda row: (method_order(row["method"]), row["seed"]))
    return table(
        "Methods",
        ("method", "seeds", "made from"),
        [
            (
                method,
                ", ".join(dict.fromkeys(str(row["seed"]) for row in rows)),
                ", ".join(dict.fromkeys(row["policy_set_id"] for row in rows if row["policy_set_id"])),
            )
            for method, rows in grouped(curves, itemgetter("method")).items()
        ],
        note="oracle ranks by the true future attention and full evicts nothing: bounds, not competitors.",
        num_labels=3,
    )


def _trainings(trainings: Sequence[Training]) -> Iterator[Block]:
    if not trainings:
        yield missing("a learned policy", "`kvp run` with `kvp` among the methods trains and evaluates one.")
        return
    yield table(
        "Training of the evaluated policies",
        ("policy set", "objective", "agent", "steps", "sequences a step", "seed", "time", "held-out cost", "hardware"),
        [
            (
                training.policy_set_id,
                training.objective,
                agent_words(training),
                str(training.parameters.get("num_steps", NOTHING)),
                str(training.parameters.get("batch_sequences", NOTHING)),
                str(training.seed),
                duration(training.seconds),
                number(training.mean_cost),
                training.hardware,
            )
            for training in trainings
        ],
        note="Held-out cost: normalised eviction cost on validation samples, mean over heads; 1 is optimal. Time adds "
        "up all groups of heads.",
        num_labels=3,
    )


def agent_words(training: Training) -> str:
    """Shape of the agents."""
    agent = training.parameters.get("agent", {})
    return ", ".join(f"{name} {value}" for name, value in sorted(agent.items()) if not isinstance(value, Mapping))


def _parameters(view: ReportView) -> Table:
    parameters = flat(view.rows.run.facts["parameters"])
    return table(
        "Parameters of the evaluation",
        ("parameter", "value"),
        [(name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)) for name, value in parameters],
        num_labels=2,
    )
