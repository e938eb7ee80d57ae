"""What differs between two runs: inputs, parameters, code, environment, and the results that moved.

Not for why a stage would run again, which compares a run with what is there now.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpolicy.digests import digest_json
from storage.errors import StorageError
from storage.lineage.artifacts import SURROUNDINGS
from storage.lineage.graph import MADE
from storage.tables.lance_table import quote

if TYPE_CHECKING:
    from storage.catalog.catalog import Catalog, CompletedRun

# Table of results -> what names a row, its value, and what else is known of that.
_RESULTS: Mapping[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "curves": (
        ("method", "benchmark", "task", "setting", "metric", "budget", "seed"),
        "value",
        ("ci_low", "ci_high", "n"),
    ),
    "heads": (("head_name",), "heldout_cost", ()),
    "head_costs": (("benchmark", "setting", "method", "seed", "head_name"), "cost", ("n",)),
    "findings": (
        ("analysis", "quantity", "benchmark", "setting", "method", "seed", "budget", "larger_budget"),
        "value",
        ("ci_low", "ci_high", "n"),
    ),
    "metrics": (("name", "step"), "value", ()),
}
_SECONDS = "seconds"  # the metric that no two runs have in common
_CODE = ("git_commit", "git_dirty", "code_fingerprint")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that differs.

    Attributes:
        kind: "stage", "input", "parameter", "seed", "code", "environment", "output" or "result".
        name: what of it.
        first: what the first run has; None where it has nothing of that name.
        second: what the second has.
    """

    kind: str
    name: str
    first: Any
    second: Any


def compare_runs(catalog: Catalog, first_id: str, second_id: str) -> list[Difference]:
    """Return what differs between two runs, causes before results.

    Args:
        catalog: the catalog.
        first_id: a run, or an artifact or MLflow run that one made; 6 or more first characters do.
        second_id: the other.

    Raises:
        StorageError: if an id is unknown or ambiguous, or no run made that artifact.
    """
    first, second = (_facts(catalog, any_id) for any_id in (first_id, second_id))
    return [
        Difference(kind=kind, name=name, first=first.get((kind, name)), second=second.get((kind, name)))
        for kind, name in dict.fromkeys([*first, *second])
        if first.get((kind, name)) != second.get((kind, name))
    ]


def _facts(catalog: Catalog, any_id: str) -> dict[tuple[str, str], Any]:
    """Everything that may differ: (kind, name) -> value."""
    run = find_run(catalog, any_id)
    known = catalog.completed_run(run)
    facts: dict[tuple[str, str], Any] = {("stage", "name"): run["stage"]}
    facts |= {("input", name): value for name, value in known.inputs.items() if name not in SURROUNDINGS}
    facts |= {("parameter", name): value for name, value in flat(json.loads(run["parameters_json"]))}
    facts |= {("seed", "seed"): run["seed"]}
    facts |= {("code", name): run[name] for name in _CODE}
    facts |= {("code", f"module {name}"): value for name, value in recorded_modules(catalog, known).items()}
    if run["environment_id"]:
        environment = catalog.artifact(run["environment_id"]).metadata
        facts |= {("environment", name): value for name, value in flat(environment)}
    if run["outcome"] in MADE:
        facts |= {("output", name): value for name, value in _contents(catalog, known)}
    for table, (keys, value, more) in _RESULTS.items():
        for row in catalog.rows(table, f"run_id = {quote(run['run_id'])}", outcomes=MADE):
            if row.get("name") == _SECONDS:
                continue
            name = " ".join([table, *(str(row[key]) for key in keys)])
            facts["result", name] = row[value]
            facts |= {("result", f"{name} {column}"): row[column] for column in more}
    return facts


def _contents(catalog: Catalog, run: CompletedRun) -> Iterator[tuple[str, str]]:
    """What a run made, by content.

    Of what has only rows in the catalog the further facts stand here and the rows below: its id also names the code.
    """
    for name, artifact in zip(run.outputs, catalog.artifacts(list(run.outputs.values())), strict=True):
        yield name, artifact.artifact_id if artifact.uri else digest_json(artifact.metadata)


def recorded_modules(catalog: Catalog, run: CompletedRun) -> Mapping[str, str]:
    """Return the modules that a run ran, each with the digest of its source; none if that was not recorded."""
    if "code" not in run.inputs:
        return {}
    modules: Mapping[str, str] = catalog.artifact(run.inputs["code"]).metadata.get("modules", {})
    return modules


def find_run(catalog: Catalog, any_id: str) -> dict[str, Any]:
    """Return the row of the run that is meant, or that made the artifact that is meant, a repetition coming last.

    Raises:
        StorageError: if the id is unknown or ambiguous, or no run made that artifact.
    """
    graph = catalog.lineage(any_id, "up")
    makers = [edge.source for edge in graph.edges if edge.target == graph.root and edge.role == "output"]
    makers.sort(key=lambda name: graph.nodes[name].facts["outcome"] == "completed")
    run_id = graph.root if graph.root.startswith("run-") else makers[-1] if makers else None
    if run_id is None:
        raise StorageError(f"no run made {graph.root}: name a run, or something that one made")
    return catalog.rows("runs", f"run_id = {quote(run_id)}")[0]


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings with the path to each; lists are leaves."""
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from flat(part, f"{name}.{key}".lstrip("."))
    else:
        yield name, value
