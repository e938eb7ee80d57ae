"""What differs between two runs: inputs, parameters, code, environment, and the results that moved.

Not for why a stage would run again, which compares a run with what is there now.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from storage.errors import StorageError
from storage.tables import quote

if TYPE_CHECKING:
    from storage.catalog import Catalog

# Table of results -> what names a row, and its value.
_RESULTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "curves": (("method", "benchmark", "task", "setting", "metric", "budget", "seed"), "value"),
    "heads": (("head_name",), "heldout_cost"),
    "metrics": (("name", "step"), "value"),
}
_CODE = ("git_commit", "git_dirty", "code_fingerprint")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that differs.

    Attributes:
        kind: "stage", "input", "parameter", "seed", "code", "environment" or "result".
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
    run = _find_run(catalog, any_id)
    edges = catalog.rows("edges", f"run_id = {quote(run['run_id'])} AND role = 'input'")
    inputs = {edge["name"]: edge["artifact_id"] for edge in edges}
    facts: dict[tuple[str, str], Any] = {("stage", "name"): run["stage"]}
    facts |= {("input", name): value for name, value in inputs.items() if name not in ("code", "environment")}
    facts |= {("parameter", name): value for name, value in _flat(json.loads(run["parameters_json"]))}
    facts |= {("seed", "seed"): run["seed"]}
    facts |= {("code", name): run[name] for name in _CODE}
    if run["environment_id"]:
        environment = catalog.artifact(run["environment_id"]).metadata
        facts |= {("environment", name): value for name, value in _flat(environment)}
    for table, (keys, value) in _RESULTS.items():
        for row in catalog.rows(table, f"run_id = {quote(run['run_id'])}"):
            facts["result", " ".join([table, *(str(row[key]) for key in keys)])] = row[value]
    return facts


def _find_run(catalog: Catalog, any_id: str) -> dict[str, Any]:
    """The row of the run that is meant, or that made the artifact that is meant."""
    graph = catalog.lineage(any_id, "up")
    makers = [edge.source for edge in graph.edges if edge.target == graph.root and edge.role == "output"]
    run_id = graph.root if graph.root.startswith("run-") else makers[-1] if makers else None
    if run_id is None:
        raise StorageError(f"no run made {graph.root}: name a run, or something that one made")
    return catalog.rows("runs", f"run_id = {quote(run_id)}")[0]


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings with the path to each; lists are leaves."""
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}".lstrip("."))
    else:
        yield name, value
