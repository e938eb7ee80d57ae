from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from storage.catalog.catalog import Catalog
from storage.errors import StorageError
from storage.lineage.graph import render_tree
from tests.storage.conftest import artifact, curve_row

MLFLOW = "0123456789abcdef0123456789abcdef"
MODEL, PROMPTS, TRACES, POLICY, CURVE, OTHER = (
    artifact(kind, "x") for kind in ("model", "prompts", "trace_snapshot", "policy_set", "curve", "evaluation")
)


@dataclass(frozen=True, kw_only=True)
class Chain:
    catalog: Catalog
    collect: str
    train: str
    evaluate: str


@pytest.fixture
def chain(catalog: Catalog) -> Chain:
    for item in (MODEL, PROMPTS):
        catalog.register(item)
    steps = {
        "collect": ({"model": MODEL, "prompts": PROMPTS}, {"traces": TRACES}),
        "train": ({"model": MODEL, "traces": TRACES}, {"policy": POLICY}),
        "evaluate": ({"model": MODEL, "policy": POLICY}, {"curve": CURVE, "evaluation": OTHER}),
    }
    runs = {}
    for stage, (inputs, outputs) in steps.items():
        with catalog.record_run(
            stage=stage,
            stage_key=stage,
            parameters={},
            inputs={name: item.artifact_id for name, item in inputs.items()},
            code_fingerprint="f" * 64,
        ) as run:
            run.mlflow_run_id = f"{stage}-parent"
            for name, item in outputs.items():
                run.output(name, item)
            if stage == "evaluate":
                run.append("curves", [curve_row(CURVE.artifact_id, budget, 0.1) for budget in (1, 2)])
        runs[stage] = run.run_id
    return Chain(catalog=catalog, **runs)


def test_a_curve_reaches_all_that_it_came_from(chain: Chain) -> None:
    graph = chain.catalog.lineage(MLFLOW)
    assert graph.root == CURVE.artifact_id
    assert graph.kinds() == {
        "curve", "run", "model", "prompts", "trace_snapshot", "policy_set", "code", "environment",
    }  # fmt: skip
    assert OTHER.artifact_id not in graph.nodes
    assert {node.id for node in graph.nodes.values() if node.kind == "run"} == {
        chain.collect,
        chain.train,
        chain.evaluate,
    }
    assert next(iter(graph.nodes)) == graph.root


def test_around_is_up_and_down_together(chain: Chain) -> None:
    graph = chain.catalog.lineage(TRACES.artifact_id, "around")
    ways = [chain.catalog.lineage(TRACES.artifact_id, way) for way in ("up", "down")]
    assert set(graph.nodes) == {name for way in ways for name in way.nodes}
    assert sorted(map(str, graph.edges)) == sorted({str(edge) for way in ways for edge in way.edges})
    assert next(iter(graph.nodes)) == graph.root


@pytest.mark.parametrize("way", ["up", "down", "around"])
def test_a_walk_of_some_steps_is_the_near_part_of_the_whole(chain: Chain, way: str) -> None:
    whole = chain.catalog.lineage(POLICY.artifact_id, way)
    sizes = []
    for steps in range(8):
        near = chain.catalog.lineage(POLICY.artifact_id, way, most_steps=steps)
        assert set(near.edges) <= set(whole.edges)
        assert near.nodes.items() <= whole.nodes.items()
        assert all({edge.source, edge.target} <= set(near.nodes) for edge in near.edges)
        sizes.append(len(near.nodes))
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (1, len(whole.nodes))
    assert set(chain.catalog.lineage(POLICY.artifact_id, "up", most_steps=1).nodes) == {POLICY.artifact_id, chain.train}


def test_a_model_reaches_all_that_it_went_into(chain: Chain) -> None:
    graph = chain.catalog.lineage(MODEL.artifact_id, "down")
    assert {TRACES.artifact_id, POLICY.artifact_id, CURVE.artifact_id, OTHER.artifact_id} < set(graph.nodes)
    assert PROMPTS.artifact_id not in graph.nodes
    assert chain.catalog.lineage(CURVE.artifact_id, "down").edges == ()


def test_ids_of_all_sorts_and_their_beginnings_are_understood(chain: Chain) -> None:
    for given, root in {
        CURVE.artifact_id: CURVE.artifact_id,
        CURVE.artifact_id[:9]: CURVE.artifact_id,
        chain.train: chain.train,
        chain.train[:12]: chain.train,
        "train-parent": chain.train,
        MLFLOW[:6]: CURVE.artifact_id,
        POLICY.artifact_id[-16:][:6]: POLICY.artifact_id,
        chain.train[-16:][:6]: chain.train,
    }.items():
        assert chain.catalog.lineage(given).root == root


def test_ids_that_mean_nothing_or_too_much_are_one_line(chain: Chain) -> None:
    for given, message in {
        "unknown-id": "no artifact, run or MLflow run 'unknown-id'",
        MLFLOW[:5]: "at least 6 characters",
        "evaluat": "may mean 2 things",
        "evaluation'": "is no id",
        "": "is no id",
    }.items():
        with pytest.raises(StorageError, match=message):
            chain.catalog.lineage(given)
    with pytest.raises(StorageError, match="expected 'up', 'down' or 'around'"):
        chain.catalog.lineage(MLFLOW, "sideways")


def test_failed_runs_are_seen_below_what_they_read(chain: Chain) -> None:
    with (
        pytest.raises(ValueError, match="broken"),
        chain.catalog.record_run(
            stage="evaluate",
            stage_key="again",
            parameters={},
            inputs={"policy": POLICY.artifact_id},
            code_fingerprint="f" * 64,
        ) as run,
    ):
        run.output("curve", CURVE)
        raise ValueError("broken")
    assert any("(failed)" in line for line in render_tree(chain.catalog.lineage(POLICY.artifact_id, "down")))
    assert run.run_id not in chain.catalog.lineage(CURVE.artifact_id).nodes


def test_outputs_of_a_run_that_was_never_published_have_no_lineage(chain: Chain) -> None:
    edge = {"run_id": "run-dead", "artifact_id": CURVE.artifact_id, "role": "output", "name": "curve"}
    chain.catalog.append("edges", [edge])
    assert "run-dead" not in chain.catalog.lineage(CURVE.artifact_id).nodes
    assert chain.catalog.sql("SELECT * FROM edges WHERE run_id = 'run-dead'").num_rows == 0


def test_the_tree_draws_everything_once(chain: Chain) -> None:
    lines = render_tree(chain.catalog.lineage(CURVE.artifact_id))
    assert lines[0] == f"curve {CURVE.artifact_id}  x"
    assert lines[1].startswith(f"└─ run {chain.evaluate}  evaluate")
    assert sum(chain.collect in line for line in lines) == 1
    down = render_tree(chain.catalog.lineage(MODEL.artifact_id, "down"))
    assert sum("(see above)" in line for line in down) == 2


def test_the_graph_is_json(chain: Chain) -> None:
    document = json.loads(json.dumps(chain.catalog.lineage(MLFLOW).to_json()))
    assert document["root"] == CURVE.artifact_id
    ids = {node["id"] for node in document["nodes"]}
    assert all({edge["source"], edge["target"]} <= ids for edge in document["edges"])
    (code,) = [node for node in document["nodes"] if node["kind"] == "code"]
    assert code["metadata"]["code_fingerprint"] == "f" * 64
