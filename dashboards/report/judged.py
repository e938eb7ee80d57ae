"""Section: what was judged, on what, and how what is judged was made."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dashboards.figures.styles import method_order
from dashboards.rendering.formats import NOTHING, counted, duration, listed, number
from dashboards.rendering.table import Table, table
from dashboards.report.document import Block, missing, prose
from dashboards.report.evaluation_rows import Training
from dashboards.report.view import ReportView, section, short
from storage.catalog.run_differences import flat
from storage.lineage.graph import LineageNode


@section("judged", "What was judged")
def judged_section(view: ReportView) -> Iterator[Block]:
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


def _budgets(view: ReportView, place: tuple[str, str]) -> str:
    panels = [panel for panel in view.panels if (panel.benchmark, panel.setting) == place]
    budgets = sorted({budget for panel in panels for budget in panel.budgets})
    shares = [view.share(place, budget) for budget in budgets]
    span = (
        "" if shares[0] is None or shares[-1] is None else f"; {shares[0]:.0%} to {shares[-1]:.0%} of the mean context"
    )
    return f"{', '.join(map(str, budgets))} tokens a KV head{span}"


def _shard_seconds(view: ReportView) -> str:
    shards = {
        edge.source
        for edge in view.rows.graph.edges
        if edge.target in view.rows.input_ids([view.rows.run_id], "evaluation_shard") and edge.role == "output"
    }
    spent = sum(view.rows.graph.nodes[name].facts["seconds"] for name in shards)
    return f"{duration(spent)} in {counted(len(shards), 'part')}" if shards else NOTHING


def _samples(view: ReportView) -> Iterator[Block]:
    if not view.rows.samples:
        yield missing("rows of the samples that were judged", "`kvp evaluate` writes them with every shard.")
        return
    grouped: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in view.rows.samples:
        grouped.setdefault((row["benchmark"], row["task"], row["setting"]), []).append(row)
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
            for key, rows in sorted(grouped.items())
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
    seeds_by_method: dict[str, dict[int, str]] = {}
    for row in view.rows.curves:
        seeds_by_method.setdefault(row["method"], {})[row["seed"]] = row["policy_set_id"]
    return table(
        "Methods",
        ("method", "seeds", "made from"),
        [
            (method, ", ".join(map(str, sorted(seeds))), ", ".join(filter(None, (seeds[s] for s in sorted(seeds)))))
            for method, seeds in sorted(seeds_by_method.items(), key=lambda item: method_order(item[0]))
        ],
        note="oracle ranks by the true future attention and full evicts nothing: bounds, not competitors.",
        num_labels=3,
    )


def _trainings(trainings: Sequence[Training]) -> Iterator[Block]:
    if not trainings:
        yield missing("a learned policy", "`kvp run` with `kvp` among the methods trains and judges one.")
        return
    yield table(
        "Training of the judged policies",
        ("policy set", "objective", "agent", "steps", "sequences a step", "seed", "time", "held-out cost", "hardware"),
        [
            (
                training.policy_set_id,
                training.objective,
                agent_words(training),
                str(training.parameters.get("num_steps", NOTHING)),
                str(training.parameters.get("batch_sequences", NOTHING)),
                str(training.run["seed"]),
                duration(training.seconds),
                number(sum(training.costs) / len(training.costs)) if training.costs else NOTHING,
                training.run["hardware"],
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
