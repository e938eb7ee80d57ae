"""A catalog of 100,000 runs and a manifest of 10 million samples, written in bulk through the tables' own code.

The proportions are those of the pipeline: each retraining is 67 runs, of which one failed and one was skipped. Nothing
here is a result; ids and digests are random, everything that refers to something refers to what is there.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.tables.schemas import TABLES

STAGES = {
    "prompts": 3,
    "collect-fragment": 30,
    "collect": 1,
    "train-heads": 9,
    "train": 1,
    "evaluate-shard": 20,
    "evaluate": 1,
    "failed": 1,
    "skipped": 1,
}
MADE = {
    "prompts": "prompts",
    "collect-fragment": "trace_fragment",
    "collect": "trace_snapshot",
    "train-heads": "head_group",
    "train": "policy_set",
    "evaluate-shard": "evaluation_shard",
    "evaluate": "evaluation",
}
RUNS_EACH = sum(STAGES.values())
METHODS = ("kvp", "full", "oracle", "random", "streaming_llm", "k_norm", "keydiff", "lagkv", "snapkv", "tova", "h2o")
SETTINGS = ("query_aware", "query_agnostic")
TASKS = ("mean", "niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
BUDGETS = (64, 108, 160, 216, 320, 432)
CURVES_EACH = len(METHODS) * len(SETTINGS)
POINTS_EACH = 2 * len(TASKS) * len(BUDGETS)
HEADS = 90
SAMPLES_EACH = 6_667
MODELS = 8
START = dt.datetime(2026, 1, 1)

Rows = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Retraining:
    """Ids of one retraining: what the oracle of the lineage is computed from."""

    model_id: str
    runs: Mapping[str, Sequence[str]]
    artifacts: Mapping[str, Sequence[str]]
    code_id: str
    environment_id: str

    @property
    def curve_came_from(self) -> set[str]:
        """Everything that each of its curves came from, the curve itself left out."""
        runs = {name for stage in MADE for name in self.runs[stage]}
        made = {name for kind in MADE.values() if kind != "evaluation" for name in self.artifacts[kind]}
        return runs | made | {self.model_id, self.code_id, self.environment_id}

    @property
    def went_from_model(self) -> set[str]:
        """Everything that the model went into here, by way of any run."""
        return (
            {name for stage in (*MADE, "failed") for name in self.runs[stage]}
            | {name for kind in MADE.values() for name in self.artifacts[kind]}
            | set(self.artifacts["curve"])
        )


def hex_texts(rng: np.random.Generator, count: int, length: int, prefix: str = "") -> np.ndarray[Any, Any]:
    """Random hexadecimal texts after a prefix."""
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)[rng.integers(0, 16, (count, length), np.uint8)]
    head = np.broadcast_to(np.frombuffer(prefix.encode(), np.uint8), (count, len(prefix)))
    return np.ascontiguousarray(np.hstack([head, digits])).view(f"S{len(prefix) + length}")[:, 0]


def to_table(schema: pa.Schema, rows: int, columns: Rows) -> pa.Table:
    """A table of some rows; single values are repeated, and what is left out is empty, zero or null."""
    return pa.table([_column(field, rows, columns.get(field.name)) for field in schema], schema=schema)


def _column(field: pa.Field, rows: int, values: Any) -> pa.Array:
    if values is None:
        if field.nullable:
            return pa.nulls(rows, field.type)
        values = "" if field.type == pa.string() else START if pa.types.is_timestamp(field.type) else 0
    if isinstance(values, np.ndarray) and values.dtype.kind == "S":
        return pc.cast(pa.array(values, pa.binary()), field.type)
    if isinstance(values, np.ndarray | list | pa.Array | pa.ChunkedArray):
        array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
        return pc.cast(array, field.type)
    return pa.repeat(pa.scalar(values, field.type), rows)


class LargeCatalog:
    """Makes blocks of retrainings.

    Args:
        seed: of everything.
        samples_each: rows of `samples` for each retraining.
    """

    def __init__(self, *, seed: int = 0, samples_each: int = SAMPLES_EACH) -> None:
        self._rng = np.random.default_rng(seed)
        self._samples_each = samples_each
        self._next = 0
        self.models = hex_texts(self._rng, MODELS, 16, "model-")
        self._surroundings = {kind: hex_texts(self._rng, 30, 16, f"{kind}-") for kind in ("code", "environment")}
        self.retrainings: list[Retraining] = []

    def shared(self) -> dict[str, pa.Table]:
        """Rows of what retrainings share: models, code and environments."""
        ids = np.concatenate([self.models, *self._surroundings.values()])
        models = {"model_id": self.models, "name": [f"model {index}" for index in range(MODELS)], "num_kv_heads": 3}
        return {
            "artifacts": self._artifacts(ids, np.zeros(len(ids), int)),
            "models": to_table(TABLES["models"], MODELS, models),
        }

    def blocks(self, retrainings: int, *, each: int = 50) -> Iterator[dict[str, pa.Table]]:
        """Rows of all tables, some retrainings at a time, in the order in which they would be written."""
        for first in range(0, retrainings, each):
            yield self._block(min(each, retrainings - first))

    def _block(self, count: int) -> dict[str, pa.Table]:
        rng = self._rng
        runs = {stage: hex_texts(rng, count * n, 16, "run-").reshape(count, n) for stage, n in STAGES.items()}
        made = {
            kind: hex_texts(rng, count * STAGES[stage], 16, f"{kind}-").reshape(count, -1)
            for stage, kind in MADE.items()
        }
        made["curve"] = hex_texts(rng, count * CURVES_EACH, 16, "curve-").reshape(count, -1)
        index = np.arange(self._next, self._next + count)
        self._next += count
        models = self.models[index % MODELS]
        code, environment = (names[index // 50 % 30] for names in self._surroundings.values())
        for row in range(count):
            self.retrainings.append(
                Retraining(
                    model_id=models[row].decode(),
                    runs={stage: [name.decode() for name in ids[row]] for stage, ids in runs.items()},
                    artifacts={kind: [name.decode() for name in ids[row]] for kind, ids in made.items()},
                    code_id=code[row].decode(),
                    environment_id=environment[row].decode(),
                )
            )
        artifacts = np.hstack(list(made.values()))
        curves = self._curves(index, models, runs["evaluate"][:, 0], made)
        return {
            "artifacts": self._artifacts(artifacts.ravel(), np.repeat(index, artifacts.shape[1])),
            "edges": self._edges(runs, made, models, code, environment),
            "samples": self._samples(count, runs["collect-fragment"]),
            "heads": self._heads(runs["train"][:, 0], made["policy_set"][:, 0], models),
            "curves": curves,
            "runs": self._runs(index, runs),
        }

    def _runs(self, index: np.ndarray[Any, Any], runs: Mapping[str, np.ndarray[Any, Any]]) -> pa.Table:
        ids = np.hstack(list(runs.values()))
        stages = np.repeat(list(STAGES), list(STAGES.values()))
        stage = np.where(stages == "failed", "train-heads", np.where(stages == "skipped", "collect", stages))
        outcome = np.where(stages == "failed", "failed", np.where(stages == "skipped", "skipped", "completed"))
        reused = np.where(stages == "skipped", runs["collect"], b"")
        seconds = np.arange(ids.size) % RUNS_EACH + index.repeat(RUNS_EACH) * 100
        times = np.datetime64(START, "us") + seconds.astype("timedelta64[s]")
        return to_table(
            TABLES["runs"],
            ids.size,
            {
                "run_id": ids.ravel(),
                "stage": np.tile(stage, len(ids)),
                "stage_key": hex_texts(self._rng, ids.size, 64),
                "outcome": np.tile(outcome, len(ids)),
                "reused_run_id": reused.ravel(),
                "parameters_json": '{"collect":{"samples_per_fragment":200},"dtype":"bfloat16"}',
                "seed": 0,
                "git_commit": "0" * 40,
                "git_dirty": False,
                "environment_id": "environment",
                "code_fingerprint": "f" * 64,
                "hardware": "2 cores, 24 GiB",
                "started_at": times,
                "ended_at": times + np.timedelta64(1, "s"),
                "seconds": 1.0,
                "prefect_flow_run_id": hex_texts(self._rng, ids.size, 32),
                "mlflow_run_id": np.where(
                    np.tile(np.isin(stage, ["train", "evaluate"]), len(ids)), hex_texts(self._rng, ids.size, 32), b""
                ),
            },
        )

    def _artifacts(self, ids: np.ndarray[Any, Any], index: np.ndarray[Any, Any]) -> pa.Table:
        kinds = pc.replace_substring_regex(pc.cast(pa.array(ids, pa.binary()), pa.string()), "-[0-9a-f]+$", "")
        columns = {
            "artifact_id": ids,
            "kind": kinds,
            "digest": hex_texts(self._rng, len(ids), 64),
            "name": kinds,
            "metadata_json": '{"benchmark":"ruler","method":"kvp","seed":0,"setting":"query_agnostic"}',
            "created_at": np.datetime64(START, "us") + (index * 100).astype("timedelta64[s]"),
        }
        return to_table(TABLES["artifacts"], len(ids), columns)

    def _edges(self, runs: Any, made: Any, models: Any, code: Any, environment: Any) -> pa.Table:
        parts: list[tuple[Any, Any, str, str]] = []

        def add(stage: str, role: str, name: str, artifacts: Any) -> None:
            """Each run of the stage with each artifact of its retraining, or with its own where they are in pairs."""
            ids = runs[stage]
            if artifacts.ndim == 1:
                artifacts = np.repeat(artifacts[:, None], ids.shape[1], axis=1)
            elif ids.shape[1] == 1:
                ids = np.repeat(ids, artifacts.shape[1], axis=1)
            parts.append((ids.ravel(), artifacts.ravel(), role, name))

        for stage in (*MADE, "failed"):
            for name, artifacts in (("model", models), ("code", code), ("environment", environment)):
                add(stage, "input", name, artifacts)
        for stage, kind in MADE.items():
            add(stage, "output", kind, made[kind])
        add("evaluate", "output", "curve", made["curve"])
        train, heldout, test = made["prompts"].T
        collected = np.where(np.arange(STAGES["collect-fragment"]) < 25, train[:, None], heldout[:, None])
        add("collect-fragment", "input", "prompts", collected)
        for stage, kind in (("collect", "trace_fragment"), ("train", "head_group"), ("evaluate", "evaluation_shard")):
            add(stage, "input", "part", made[kind])
        for stage in ("train-heads", "train", "failed"):
            add(stage, "input", "snapshot", made["trace_snapshot"][:, 0])
        for stage in ("evaluate-shard", "evaluate"):
            add(stage, "input", "policy_0", made["policy_set"][:, 0])
            add(stage, "input", "prompts", test)
        lengths = [len(part[0]) for part in parts]
        columns = {
            "run_id": np.concatenate([part[0] for part in parts]),
            "artifact_id": np.concatenate([part[1] for part in parts]),
            "role": np.repeat([part[2] for part in parts], lengths),
            "name": np.repeat([part[3] for part in parts], lengths),
        }
        return to_table(TABLES["edges"], sum(lengths), columns)

    def _samples(self, count: int, fragments: np.ndarray[Any, Any]) -> pa.Table:
        rows = count * self._samples_each
        number = pa.array(np.tile(np.arange(self._samples_each), count)).cast(pa.string())
        columns = {
            "sample_id": pc.binary_join_element_wise("ruler/niah_single_1/train/0", number, "4096", "/"),
            "benchmark": "ruler",
            "task": "niah_single_1",
            "split": "train",
            "setting": "query_agnostic",
            "prompt_digest": hex_texts(self._rng, rows, 64),
            "context_tokens": 4096,
            "collection": np.repeat(hex_texts(self._rng, count, 64), self._samples_each),
            "model_digest": "d" * 64,
            "run_id": fragments[:, np.arange(self._samples_each) * fragments.shape[1] // self._samples_each].ravel(),
        }
        return to_table(TABLES["samples"], rows, columns)

    def _heads(self, runs: Any, policies: Any, models: Any) -> pa.Table:
        head = np.tile(np.arange(HEADS), len(runs))
        columns = {
            "policy_set_id": np.repeat(policies, HEADS),
            "model_digest": np.repeat(models, HEADS),
            "head": head,
            "head_name": [f"L{index // 3:02d}.H{index % 3}" for index in head],
            "layer": head // 3,
            "kv_head": head % 3,
            "heldout_cost": 1 + self._rng.random(len(head)),
            "steps": 600,
            "run_id": np.repeat(runs, HEADS),
        }
        return to_table(TABLES["heads"], len(head), columns)

    def _curves(self, index: Any, models: Any, runs: Any, made: Any) -> pa.Table:
        count, each = len(runs), CURVES_EACH * POINTS_EACH
        metric, task, budget = np.unravel_index(np.arange(POINTS_EACH), (2, len(TASKS), len(BUDGETS)))

        def points(names: Sequence[Any], which: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return np.tile(np.array(names)[which], count * CURVES_EACH)

        columns = {
            "evaluation_id": np.repeat(made["evaluation"][:, 0], each),
            "run_id": np.repeat(runs, each),
            "mlflow_run_id": np.repeat(hex_texts(self._rng, count * CURVES_EACH, 32), POINTS_EACH),
            "curve_id": np.repeat(made["curve"].ravel(), POINTS_EACH),
            "model_id": np.repeat(models, each),
            "model_digest": np.repeat(models, each),
            "method": np.tile(np.repeat(METHODS, len(SETTINGS) * POINTS_EACH), count),
            "benchmark": "ruler",
            "task": points(TASKS, task),
            "setting": np.tile(np.repeat(SETTINGS, POINTS_EACH), count * len(METHODS)),
            "metric": points(["kl", "string_match"], metric),
            "budget": points(BUDGETS, budget),
            "value": self._rng.random(count * each),
            "n": 18,
            "created_at": np.datetime64(START, "us") + np.repeat(index * 100, each).astype("timedelta64[s]"),
        }
        return to_table(TABLES["curves"], count * each, columns)


def manifest_blocks(schema: pa.Schema, collections: Sequence[str], *, samples: int, each: int) -> Iterator[pa.Table]:
    """Rows of the manifest, some collections at a time; a fragment holds 16 samples."""
    rng = np.random.default_rng(1)
    for first in range(0, len(collections), each):
        own = np.array(collections[first : first + each], "S")
        rows, fragments = len(own) * samples, -(-samples // 16)
        which = (np.arange(len(own))[:, None] * fragments + np.arange(samples) // 16).ravel()
        number = pa.array(np.tile(np.arange(samples), len(own))).cast(pa.string())
        columns = {
            "collection": np.repeat(own, samples),
            "sample_id": pc.binary_join_element_wise("ruler/niah_single_1/train/0", number, "4096", "/"),
            "benchmark": "ruler",
            "task": "niah_single_1",
            "split": "train",
            "setting": "query_agnostic",
            "prompt_digest": hex_texts(rng, rows, 64),
            "context_tokens": 4096,
            "model_digest": "d" * 64,
            "fragment_id": hex_texts(rng, len(own) * fragments, 32)[which],
            "start": np.tile(np.arange(samples) % 16 * 4096, len(own)),
            "sample_digest": hex_texts(rng, rows, 64),
            "metadata_digest": hex_texts(rng, len(own) * fragments, 64)[which],
        }
        yield to_table(schema, rows, columns)
