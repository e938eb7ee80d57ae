"""Rows of the catalog on one evaluation and its origin: all the data of a report."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean
from typing import Any

from dashboards.grouping import Row
from kvpolicy.results.objectives import ObjectiveRow
from storage.catalog.catalog import Catalog
from storage.catalog.run_differences import find_run
from storage.errors import StorageError
from storage.lineage.graph import LineageGraph, LineageNode
from storage.tables.lance_table import quote

_PARTS = ("evaluate-shard", "analyse-shard")


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training of policies.

    Attributes:
        run: its run in the lineage.
        policy_set_id: its result.
        snapshot_ids: the traces that it read.
        part_run_ids: runs that trained its head groups.
        seconds: time of all of them, added up.
        costs: held-out cost of each head.
        curve: rows of the table `metrics`.
    """

    run: LineageNode
    policy_set_id: str
    snapshot_ids: tuple[str, ...]
    part_run_ids: tuple[str, ...]
    seconds: float
    costs: tuple[float, ...]
    curve: tuple[Row, ...]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Its settings."""
        train: Mapping[str, Any] = self.run.facts["parameters"]["train"]
        return train

    @property
    def objective(self) -> str:
        """Name of the minimised objective."""
        return str(self.parameters["objective"])

    @property
    def mean_cost(self) -> float:
        """Mean held-out cost over heads; NaN where there is none."""
        return fmean(self.costs) if self.costs else math.nan

    def measured(self, name: str) -> dict[float, float]:
        """A metric of its course by training step."""
        return {row["step"]: row["value"] for row in self.curve if row["name"] == name}

    @property
    def seed(self) -> int:
        """Seed of its run."""
        return int(self.run.facts["seed"])

    @property
    def hardware(self) -> str:
        """Hardware of its run."""
        return str(self.run.facts["hardware"])


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportRows:
    """Rows of one evaluation.

    Attributes:
        graph: the lineage of the evaluation.
        evaluation_id: the evaluation.
        run_id: the run that made it.
        models: row of the table `models`, or none.
        samples: the evaluated samples.
        curves: budget curves.
        comparisons: every method against every other, mean over tasks.
        task_comparisons: the same within single tasks; rows have a `task` as well.
        objective_comparisons: training objectives by held-out cost, paired by head and seed.
        head_costs: cost of each head under each method.
        heads: outcome of training and shape of importance, for each head of each policy set of this evaluation.
        head_pairs: correlations between heads.
        findings: further analyses.
        trainings: of this evaluation's policy sets.
        other_trainings: the home's other trainings on the same traces.
    """

    graph: LineageGraph
    evaluation_id: str
    run_id: str
    models: Sequence[Row] = ()
    samples: Sequence[Row] = ()
    curves: Sequence[Row] = ()
    comparisons: Sequence[Row] = ()
    task_comparisons: Sequence[Row] = ()
    objective_comparisons: Sequence[ObjectiveRow] = ()
    head_costs: Sequence[Row] = ()
    heads: Sequence[Row] = ()
    head_pairs: Sequence[Row] = ()
    findings: Sequence[Row] = ()
    trainings: Sequence[Training] = ()
    other_trainings: Sequence[Training] = ()

    @property
    def evaluation(self) -> LineageNode:
        """The evaluation."""
        return self.graph.nodes[self.evaluation_id]

    @property
    def run(self) -> LineageNode:
        """The run that made it."""
        return self.graph.nodes[self.run_id]

    def inputs(self, run_id: str, kind: str) -> list[LineageNode]:
        """Artifacts of one kind that a run read."""
        return _inputs(self.graph, run_id, kind)

    def input_ids(self, run_ids: Iterable[str], kind: str) -> list[str]:
        """Ids of artifacts of one kind that some runs read, each once."""
        return list(dict.fromkeys(node.id for run_id in run_ids for node in self.inputs(run_id, kind)))


def find_evaluation(catalog: Catalog, any_id: str) -> tuple[str, str]:
    """Return the evaluation that an id is or belongs to, and the run that made it.

    Args:
        catalog: the catalog.
        any_id: an evaluation, its run, an MLflow run, one of its curves or shards; 6 or more first characters do.

    Raises:
        StorageError: if the id is unknown or ambiguous, or belongs to no evaluation, or to several.
    """
    run = find_run(catalog, any_id)
    if run["stage"] != "evaluate":
        below = catalog.lineage(run["run_id"], "down")
        ids = sorted(node.id for node in below.nodes.values() if node.kind == "evaluation")
        if run["stage"] not in _PARTS or len(ids) != 1:
            choice = f"name one of {', '.join(ids)}" if ids else "none came from it; run `kvp evaluate`"
            raise StorageError(
                f"report: {any_id} is of a {run['stage']} run and belongs to no single evaluation: {choice}"
            )
        run = find_run(catalog, ids[0])
    if run["outcome"] != "completed":
        raise StorageError(
            f"report: {run['run_id']} is {run['outcome']} ({run['reason']}): name an evaluation that was completed"
        )
    outputs = catalog.completed_run(run).outputs
    return outputs["evaluation"], run["run_id"]


def read_report_rows(catalog: Catalog, any_id: str) -> ReportRows:
    """Read everything about the evaluation that an id is or belongs to.

    Raises:
        StorageError: as `find_evaluation`; if the evaluation has no curves; if the catalog cannot be read.
    """
    evaluation_id, run_id = find_evaluation(catalog, any_id)
    graph = catalog.lineage(evaluation_id)
    of_run = f"run_id = {quote(run_id)}"
    curves = catalog.rows("curves", of_run)
    if not curves:
        raise StorageError(
            f"report: {evaluation_id} has no rows in the table curves: they are lost; run `kvp evaluate` again"
        )
    policy_sets = [node.id for node in _inputs(graph, run_id, "policy_set")]
    shards = _makers(graph, [node.id for node in _inputs(graph, run_id, "evaluation_shard")])
    trainings, others = _trainings(catalog, graph, policy_sets)
    return ReportRows(
        graph=graph,
        evaluation_id=evaluation_id,
        run_id=run_id,
        models=catalog.rows("models", _is_one_of("model_id", {row["model_id"] for row in curves})),
        samples=catalog.rows("samples", _is_one_of("run_id", [run.id for run in shards])) if shards else (),
        curves=curves,
        comparisons=catalog.rows("comparisons", of_run),
        head_costs=catalog.rows("head_costs", of_run),
        heads=_of_policies(catalog, "heads", policy_sets),
        head_pairs=_of_policies(catalog, "head_pairs", policy_sets),
        findings=catalog.rows("findings", of_run),
        trainings=trainings,
        other_trainings=others,
    )


def _inputs(graph: LineageGraph, run_id: str, kind: str) -> list[LineageNode]:
    """Artifacts of one kind that a run read, each once."""
    read = dict.fromkeys(edge.source for edge in graph.edges if edge.target == run_id and edge.role == "input")
    return [graph.nodes[name] for name in read if graph.nodes[name].kind == kind]


def _makers(graph: LineageGraph, artifact_ids: Iterable[str]) -> list[LineageNode]:
    """Completed runs that made some artifacts, one each."""
    makers = {
        edge.target: graph.nodes[edge.source]
        for edge in graph.edges
        if edge.role == "output" and graph.nodes[edge.source].facts["outcome"] == "completed"
    }
    return [makers[name] for name in artifact_ids if name in makers]


def _of_policies(catalog: Catalog, table: str, policy_sets: Sequence[str]) -> list[Row]:
    return list(catalog.rows(table, _is_one_of("policy_set_id", policy_sets))) if policy_sets else []


def _trainings(
    catalog: Catalog, graph: LineageGraph, policy_sets: Sequence[str]
) -> tuple[list[Training], list[Training]]:
    """The trainings of some policy sets, and all others on the same traces; the last one of each policy set counts."""
    runs = _makers(graph, policy_sets)
    snapshots = dict.fromkeys(node.id for run in runs for node in _inputs(graph, run.id, "trace_snapshot"))
    by_policy: dict[str, Training] = {}
    for snapshot in snapshots:
        # The training of a head group reads the traces, and the training that gathers the groups reads them as well.
        below = catalog.lineage(snapshot, "down", most_steps=3)
        for edge in below.edges:
            run = below.nodes[edge.source]
            if run.name == "train" and edge.name == "policy" and run.facts["outcome"] == "completed":
                by_policy[edge.target] = _training(catalog, below, run, edge.target)
    trainings = [by_policy.pop(name) for name in policy_sets if name in by_policy]
    return trainings, list(by_policy.values())


def _training(catalog: Catalog, graph: LineageGraph, run: LineageNode, policy_set_id: str) -> Training:
    parts = _makers(graph, [node.id for node in _inputs(graph, run.id, "head_group")])
    of_run = f"run_id = {quote(run.id)}"
    heads = catalog.rows("heads", of_run, ["head", "heldout_cost"])
    return Training(
        run=run,
        policy_set_id=policy_set_id,
        snapshot_ids=tuple(sorted(node.id for node in _inputs(graph, run.id, "trace_snapshot"))),
        part_run_ids=tuple(part.id for part in parts),
        seconds=sum(part.facts["seconds"] for part in (*parts, run)),
        costs=tuple(row["heldout_cost"] for row in sorted(heads, key=itemgetter("head"))),
        curve=tuple(catalog.rows("metrics", of_run)),
    )


def _is_one_of(column: str, values: Iterable[str]) -> str:
    """A condition on a column of text; there must be a value."""
    return f"{column} IN ({', '.join(quote(value) for value in sorted(set(values)))})"
