"""The catalog and the stored rankings of a home, as the pages read them.

Rows of completed runs are immutable, so they are cached; lists of runs are read again after each new run.
"""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from dashboards.figures.styles import made_from
from kvpolicy.names import MEAN_TASK
from kvpolicy.results.budget_curves import resample_scores
from kvpolicy.results.comparisons import compare_methods
from storage.catalog.catalog import Catalog
from storage.catalog.stored_scores import stored_bootstrap, stored_scores
from storage.home import Home
from storage.lineage.artifacts import SURROUNDINGS
from storage.tables.lance_table import quote
from storage.token_ranks import StoredContext, list_contexts, list_rankings, read_context

T = TypeVar("T")
Row = dict[str, Any]
_Pairs = tuple[tuple[str, str], ...]
_REMEMBERED = 32  # of at most some ten megabytes each: the points of an evaluation
_CURVE = (
    "method", "benchmark", "task", "setting", "metric", "budget", "value", "ci_low", "ci_high", "n", "seed",
    "policy_set_id", "curve_id", "mlflow_run_id",
)  # fmt: skip
_COMPARISON = (
    "benchmark", "setting", "metric", "budget", "method", "other", "difference", "ci_low", "ci_high", "verdict",
    "is_best_baseline",
)  # fmt: skip
_HEAD_COST = ("benchmark", "setting", "method", "seed", "head", "head_name", "cost", "policy_set_id", "n")
_HEAD_PAIR = ("head_a", "head_b", "spearman", "n", "run_id")  # of a thousand heads half a million
_RUN = (
    "run_id", "stage", "outcome", "reason", "reused_run_id", "seed", "git_commit", "git_dirty", "started_at",
    "ended_at", "seconds", "prefect_flow_run_id", "prefect_task_run_id", "mlflow_run_id",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A completed evaluation.

    Attributes:
        id: its artifact.
        run_id: the run whose rows are its results.
        name: for people.
        model_id: artifact of the model.
        model_name: for people.
        ended_at: when it was completed, UTC.
    """

    id: str
    run_id: str
    name: str
    model_id: str
    model_name: str
    ended_at: dt.datetime

    @property
    def choices(self) -> dict[str, str]:
        """The choices in a URL that select it."""
        return {"model": self.model_id, "evaluation": self.id}


@dataclass(frozen=True, kw_only=True)
class ListedContext:
    """A context whose rankings were kept token by token.

    Attributes:
        shard_id: the shard that has it.
        folder: of that shard.
        sample_id: the sample.
        task: its task.
        setting: query_aware or query_agnostic.
        num_tokens: tokens of the context.
        budgets: at which it was evaluated.
        rankings: (method, seed) of its rankings, and the folder of each.
    """

    shard_id: str
    folder: Path
    sample_id: str
    task: str
    setting: str
    num_tokens: int
    budgets: tuple[int, ...]
    rankings: Mapping[tuple[str, int], Path]


class Records:
    """The records of a home, for any number of threads."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.catalog = Catalog(home)
        self._remember = functools.lru_cache(_REMEMBERED)(lambda version, read, *given: read(*given))

    def _once(self, read: Callable[..., T], *given: Any) -> T:
        """Call a reader of immutable records, and cache its answer."""
        return cast("T", self._remember(None, read, *given))

    def _now(self, read: Callable[..., T], *given: Any) -> T:
        """Call a reader, and cache its answer until the next run is recorded."""
        return cast("T", self._remember(self.catalog.version(), read, *given))

    def evaluations(self) -> list[Evaluation]:
        """All completed evaluations, the newest first."""
        return self._now(self._evaluations)

    def _evaluations(self) -> list[Evaluation]:
        where = "stage = 'evaluate' AND outcome = 'completed'"
        runs = {row["run_id"]: row for row in self.catalog.rows("runs", where, ["run_id", "ended_at"])}
        made: dict[str, str] = {}
        models: dict[str, str] = {}
        for edge in self.catalog.rows("edges", "name IN ('evaluation', 'model')"):
            if edge["run_id"] in runs:
                (made if edge["role"] == "output" else models)[edge["run_id"]] = edge["artifact_id"]
        names = self._names([*made.values(), *models.values()])
        newest = {made[run_id]: run_id for run_id in runs if run_id in made}  # of two that made one, the later
        evaluations = [
            Evaluation(
                id=evaluation_id,
                run_id=run_id,
                name=names[evaluation_id],
                model_id=models.get(run_id, ""),
                model_name=names.get(models.get(run_id, ""), "unknown model"),
                ended_at=runs[run_id]["ended_at"],
            )
            for evaluation_id, run_id in newest.items()
        ]
        return sorted(evaluations, key=lambda evaluation: evaluation.ended_at, reverse=True)

    def _names(self, artifact_ids: Iterable[str]) -> dict[str, str]:
        artifacts = self.catalog.artifacts(list(dict.fromkeys(artifact_ids)))
        return {artifact.artifact_id: artifact.name for artifact in artifacts}

    def _of_run(self, table: str, run_id: str, columns: Sequence[str] | None = None) -> list[Row]:
        return self._once(self.catalog.rows, table, f"run_id = {quote(run_id)}", columns)

    def curves(self, evaluation: Evaluation) -> list[Row]:
        """Points of its budget curves."""
        return self._of_run("curves", evaluation.run_id, _CURVE)

    def comparisons(self, evaluation: Evaluation) -> list[Row]:
        """Its paired differences between methods, mean over tasks."""
        return self._of_run("comparisons", evaluation.run_id, _COMPARISON)

    def compared(self, evaluation: Evaluation, curves: Sequence[Row]) -> list[Row]:
        """Compare methods within a task, or by some seeds, as the evaluation itself compared them over all.

        Args:
            evaluation: the evaluation.
            curves: points of the curves to compare, all of one benchmark, setting, metric and task.

        Returns:
            Rows like those of `comparisons`; none if the scores of the samples are lost.
        """
        wanted = {name: curves[0][name] for name in ("benchmark", "setting", "metric", "task")}
        if wanted["task"] == MEAN_TASK:
            del wanted["task"]
        contenders = frozenset((row["method"], row["seed"]) for row in curves)
        trained = made_from(curves)
        return self._once(self._compare, evaluation.run_id, (*wanted.items(),), contenders, (*trained.items(),))

    def _compare(
        self, run_id: str, wanted: _Pairs, contenders: frozenset[tuple[str, int]], trained: _Pairs
    ) -> list[Row]:
        scores = stored_scores(self.catalog, run_id, **dict(wanted))
        chosen = [score for score in scores if (score.method, score.seed) in contenders]
        tables = resample_scores(chosen, stored_bootstrap(self.catalog, run_id))
        return [comparison.to_row() for comparison in compare_methods(tables, dict(trained))]

    def head_costs(self, evaluation: Evaluation) -> list[Row]:
        """Cost of each head under each method."""
        return self._of_run("head_costs", evaluation.run_id, _HEAD_COST)

    def inputs(self, evaluation: Evaluation) -> dict[str, str]:
        """Inputs of its run: role to artifact id."""
        edges = self._of_run("edges", evaluation.run_id)
        return {edge["name"]: edge["artifact_id"] for edge in edges if edge["role"] == "input"}

    def policy_sets(self, evaluation: Evaluation) -> list[str]:
        """The policy sets that were evaluated, in the order of their seeds."""
        return [name for name in self.inputs(evaluation).values() if name.startswith("policy_set-")]

    def of_policy_set(self, table: str, policy_set_id: str) -> list[Row]:
        """Rows of `heads`, `head_curves`, `head_pairs` or `metrics` of the last training that made a policy set."""
        columns = _HEAD_PAIR if table == "head_pairs" else None
        rows = self._once(self.catalog.rows, table, f"policy_set_id = {quote(policy_set_id)}", columns)
        return [row for row in rows if row["run_id"] == rows[-1]["run_id"]]

    def policy_sets_with_pairs(self) -> list[tuple[str, str]]:
        """(id, name) of the policy sets that heads can be compared for, the newest first."""
        return self._now(self._policy_sets)

    def _policy_sets(self) -> list[tuple[str, str]]:
        trained = self.catalog.rows("runs", "stage = 'train' AND outcome = 'completed'", ["run_id"])
        runs = {row["run_id"] for row in trained}
        edges = self.catalog.rows("edges", "name = 'policy' AND role = 'output'", ["run_id", "artifact_id"])
        return list(self._names(edge["artifact_id"] for edge in edges[::-1] if edge["run_id"] in runs).items())

    def contexts(self, evaluation: Evaluation) -> list[ListedContext]:
        """The contexts whose rankings it kept token by token."""
        inputs = self.inputs(evaluation).values()
        return self._once(self._contexts, tuple(name for name in inputs if name.startswith("evaluation_shard-")))

    def _contexts(self, shard_ids: Sequence[str]) -> list[ListedContext]:
        """The contexts in some shards, each with the rankings of it in all of them."""
        shards = self.catalog.artifacts(shard_ids)
        rankings: dict[tuple[str, str], dict[tuple[str, int], Path]] = {}
        for folder in (Path(shard.uri) for shard in shards if shard.metadata["num_rankings"]):
            for row in list_rankings(folder):
                rankings.setdefault((row["sample_id"], row["setting"]), {})[row["method"], row["seed"]] = folder
        return [
            ListedContext(
                shard_id=shard.artifact_id,
                folder=Path(shard.uri),
                sample_id=row["sample_id"],
                task=row["task"],
                setting=row["setting"],
                num_tokens=row["num_tokens"],
                budgets=tuple(int(budget) for budget in row["budgets"]),
                rankings=rankings.get((row["sample_id"], row["setting"]), {}),
            )
            for shard in shards
            if shard.metadata["num_contexts"]
            for row in list_contexts(Path(shard.uri))
        ]

    def context(self, listed: ListedContext, methods: Iterable[tuple[str, int]]) -> StoredContext | None:
        """One of them, with the rankings of some methods."""
        wanted = {name: listed.rankings[name] for name in sorted(set(methods)) if name in listed.rankings}
        return self._once(self._context, listed.folder, listed.sample_id, listed.setting, tuple(wanted.items()))

    def _context(self, folder: Path, sample_id: str, setting: str, rankings: Iterable[Any]) -> StoredContext | None:
        return read_context(folder, sample_id, setting, dict(rankings))

    def runs(self) -> list[Row]:
        """All runs in the order in which they were recorded, the newest first, without parameters."""
        return self._now(self.catalog.rows, "runs", None, _RUN)[::-1]

    def decisions(self) -> list[Row]:
        """All decisions on champions in the order in which they were made."""
        return self._now(self.catalog.rows, "promotions")

    def models(self) -> dict[str, Row]:
        """Models by digest."""
        return {row["digest"]: row for row in self._now(self.catalog.rows, "models")}

    def artifacts(self) -> list[Row]:
        """All artifacts but code, environments and requests, the newest first."""
        where = f"kind NOT IN ({', '.join(map(quote, sorted(SURROUNDINGS)))})"
        return self._now(self.catalog.rows, "artifacts", where, ("artifact_id", "kind", "name", "created_at"))[::-1]
