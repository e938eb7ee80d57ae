"""A home with one evaluation whose every number is planted, so that a report's words can be checked by hand.

Fidelity (`kl`) of each method at 64, 128 and 256 tokens, query-agnostic, mean over tasks; every score of a task is its
mean, so paired differences are exact and so are their intervals:

    kvp       0.40  0.20  0.04     two seeds, 0.02 to either side
    snapkv    0.30  0.50  0.10     better than kvp at 64, worse from 128 on
    h2o       0.90  0.21  0.20     undecided at 128
    oracle    0.10  0.10  0.03
    full      0     0     0
"""

from collections.abc import Iterator, Mapping
from typing import Any

from kvpolicy.digests import digest_bytes
from storage.catalog.catalog import Catalog
from storage.home import Home
from storage.lineage.artifacts import Artifact
from storage.lineage.recording import RunRecorder

BUDGETS = (64, 128, 256)
FIDELITY = {
    "kvp": (0.40, 0.20, 0.04),
    "snapkv": (0.30, 0.50, 0.10),
    "h2o": (0.90, 0.21, 0.20),
    "oracle": (0.10, 0.10, 0.03),
    "full": (0.0, 0.0, 0.0),
}
HALF_WIDTH = 0.05
"""Of every planted interval of a difference in fidelity; half of that in string match, which moves half as much."""
TASKS = ("niah_single_1", "vt")
SHIFT = {"mean": 0.0, "niah_single_1": -0.01, "vt": 0.01}
HEADS = [(layer, kv_head) for layer in range(3) for kv_head in range(2)]
EVALUATE = {"num_resamples": 200, "confidence": 0.95, "budgets": list(BUDGETS), "settings": ["query_agnostic"]}
BOUNDS = ("oracle", "full")


def artifact(kind: str, name: str, **metadata: Any) -> Artifact:
    return Artifact(kind=kind, digest=digest_bytes(f"{kind} {name}".encode()), name=name, metadata=metadata)


MODEL = artifact("model", "tiny model")
POLICIES = [artifact("policy_set", f"tiny, exact, seed {seed}", seed=seed) for seed in (0, 1)]
OTHER_POLICY = artifact("policy_set", "tiny, mse, seed 0", seed=0)
SNAPSHOT = artifact("trace_snapshot", "10 samples")
PROMPTS = {
    split: artifact("prompts", f"{split} prompts", split=split, reported={"no fitting length": 2, "empty answer": 1})
    for split in ("train", "test")
}
EVALUATION = artifact("evaluation", "tiny model on ruler, 8 samples")
SHARD = artifact("evaluation_shard", "kvp 0 on examples 0 to 7", num_contexts=0, num_rankings=0)


def mlflow_id(name: str) -> str:
    return digest_bytes(name.encode())[:32]


def seeds_of(method: str) -> tuple[int, ...]:
    return (0, 1) if method == "kvp" else (0,)


def of_seed(method: str, seed: int) -> float:
    return (0.02 if seed else -0.02) if method == "kvp" else 0.0


def curve_rows(*, benchmark: str = "ruler", tasks: tuple[str, ...] = TASKS) -> Iterator[dict[str, Any]]:
    for method, values in FIDELITY.items():
        for seed in seeds_of(method):
            curve = artifact("curve", f"{benchmark} {method} {seed}")
            for task in ("mean", *tasks):
                for budget, value in zip(BUDGETS, values, strict=True):
                    kl = 0.0 if method == "full" else value + of_seed(method, seed) * value + SHIFT.get(task, 0.0)
                    for metric, own in (("kl", kl), ("string_match", 1 - 0.5 * kl)):
                        yield {
                            "evaluation_id": EVALUATION.artifact_id,
                            "mlflow_run_id": mlflow_id(curve.name),
                            "curve_id": curve.artifact_id,
                            "model_id": MODEL.artifact_id,
                            "model_digest": MODEL.digest,
                            "policy_set_id": POLICIES[seed].artifact_id if method == "kvp" else "",
                            "method": method,
                            "benchmark": benchmark,
                            "task": task,
                            "setting": "query_agnostic",
                            "metric": metric,
                            "budget": budget,
                            "value": own,
                            "ci_low": 0.9 * own if metric == "kl" else None,
                            "ci_high": 1.1 * own if metric == "kl" else None,
                            "n": 8 if task == "mean" else 4,
                            "seed": seed,
                        }


def comparison_rows(*, benchmark: str = "ruler", metric: str = "kl") -> Iterator[dict[str, Any]]:
    """Every pair in both orders, with planted verdicts; the interval is a tenth of 1 to either side."""
    sign = 1.0 if metric == "kl" else -0.5
    for method in FIDELITY:
        for other in FIDELITY:
            for place, budget in enumerate(BUDGETS):
                if method != other:
                    yield _comparison(benchmark, metric, method, other, place, budget, sign)


def _comparison(
    benchmark: str, metric: str, method: str, other: str, place: int, budget: int, sign: float
) -> dict[str, Any]:
    difference = sign * (FIDELITY[method][place] - FIDELITY[other][place])
    width = HALF_WIDTH * abs(sign)
    goodness = -sign * difference / sign**2
    verdict = "undecided" if abs(difference) <= width else "better" if goodness > 0 else "worse"
    return {
        "evaluation_id": EVALUATION.artifact_id,
        "model_digest": MODEL.digest,
        "benchmark": benchmark,
        "setting": "query_agnostic",
        "metric": metric,
        "budget": budget,
        "method": method,
        "other": other,
        "difference": difference,
        "ci_low": difference - width,
        "ci_high": difference + width,
        "confidence": {"better": 1.0, "worse": 0.0, "undecided": 0.5 + goodness}[verdict],
        "verdict": verdict,
        "is_contest": method not in BOUNDS and other not in BOUNDS,
        "is_best_baseline": False,
        "n": 8,
        "num_seeds": len(seeds_of(method)),
        "other_num_seeds": len(seeds_of(other)),
        "seed_std": 0.03 if method == "kvp" else None,
    }


def score_rows() -> Iterator[dict[str, Any]]:
    """Four samples a task, each with the planted mean."""
    for method, values in FIDELITY.items():
        for seed in seeds_of(method):
            for task in TASKS:
                for number in range(4):
                    for budget, value in zip(BUDGETS, values, strict=True):
                        yield {
                            "evaluation_id": EVALUATION.artifact_id,
                            "sample_id": f"{task}-{number}",
                            "benchmark": "ruler",
                            "task": task,
                            "setting": "query_agnostic",
                            "method": method,
                            "seed": seed,
                            "budget": budget,
                            "metric": "kl",
                            "value": 0.0 if method == "full" else value * (1 + of_seed(method, seed)) + SHIFT[task],
                        }


def head_rows(policy: Artifact) -> list[dict[str, Any]]:
    """Held-out cost 1.1, 1.2, ... in the order of heads."""
    return [
        {
            "policy_set_id": policy.artifact_id,
            "model_digest": MODEL.digest,
            "head": head,
            "head_name": f"L{layer:02}.H{kv_head}",
            "layer": layer,
            "kv_head": kv_head,
            "heldout_cost": 1.1 + 0.1 * head,
            "steps": 20,
            "zipf_slope": 2.0 - 0.1 * head,
            "effective_tokens": 10.0 + head,
            "rank_deviation": 0.04,
        }
        for head, (layer, kv_head) in enumerate(HEADS)
    ]


def pair_rows(policy: Artifact) -> list[dict[str, Any]]:
    return [
        {
            "policy_set_id": policy.artifact_id,
            "model_digest": MODEL.digest,
            "head_a": first,
            "head_b": second,
            "spearman": 1.0 - 0.1 * (second - first),
            "n": 2,
        }
        for first in range(len(HEADS))
        for second in range(first + 1, len(HEADS))
    ]


def head_cost_rows() -> Iterator[dict[str, Any]]:
    costs = {"kvp": 1.2, "snapkv": 2.5, "h2o": 3.0, "oracle": 1.0}
    for method, cost in costs.items():
        for head, (layer, kv_head) in enumerate(HEADS):
            yield {
                "evaluation_id": EVALUATION.artifact_id,
                "policy_set_id": POLICIES[0].artifact_id if method == "kvp" else "",
                "model_digest": MODEL.digest,
                "benchmark": "ruler",
                "setting": "query_agnostic",
                "method": method,
                "seed": 0,
                "head": head,
                "head_name": f"L{layer:02}.H{kv_head}",
                "cost": cost if method == "oracle" else cost + 0.1 * head,
                "n": 8,
            }


def metric_rows(policy: Artifact, final: float) -> Iterator[dict[str, Any]]:
    for step, cost in ((5, 3.0), (10, 2.0), (20, final)):
        for name, value in (("heldout_cost", cost), ("seconds", 0.5 * step), ("loss", cost - 1)):
            yield {"policy_set_id": policy.artifact_id, "step": step, "name": name, "value": value}


def finding_rows() -> Iterator[dict[str, Any]]:
    common = {
        "evaluation_id": EVALUATION.artifact_id,
        "model_digest": MODEL.digest,
        "benchmark": "ruler",
        "setting": "query_agnostic",
        "seed": 0,
        "n": 2,
    }
    for smaller, larger, overlap in ((64, 128, 0.9), (64, 256, 0.8), (128, 256, 0.95)):
        for quantity, value in (("overlap", overlap), ("excess_missed_mass", 1 - overlap)):
            yield common | {
                "analysis": "nestedness",
                "quantity": quantity,
                "method": "oracle",
                "budget": smaller,
                "larger_budget": larger,
                "value": value,
                "ci_low": value - 0.02,
                "ci_high": value + 0.02,
            }
    for method, value in (("kvp", 0.6), ("snapkv", 0.3), ("oracle", 0.7)):
        yield common | {"analysis": "leave_one_out", "quantity": "spearman", "method": method, "value": value}


def sample_rows(tokens: int = 640) -> Iterator[dict[str, Any]]:
    for task in TASKS:
        for number in range(4):
            yield {
                "sample_id": f"{task}-{number}",
                "benchmark": "ruler",
                "task": task,
                "split": "test",
                "setting": "query_agnostic",
                "seed": 0,
                "prompt_digest": "0" * 64,
                "context_tokens": tokens,
                "question_tokens": 12,
                "answer_tokens": 8,
                "collection": "",
                "model_digest": MODEL.digest,
            }


MODEL_ROW = {
    "model_id": MODEL.artifact_id,
    "name": "tiny model",
    "source": "folder",
    "revision": "",
    "digest": MODEL.digest,
    "architecture": "llama",
    "num_layers": 3,
    "num_query_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_positions": 512,
}


def record(
    catalog: Catalog,
    stage: str,
    inputs: Mapping[str, Artifact],
    outputs: Mapping[str, Artifact],
    tables: Mapping[str, list[dict[str, Any]]] | None = None,
    *,
    parameters: Mapping[str, Any] | None = None,
    seed: int = 0,
    mlflow_run_id: str = "",
) -> str:
    """Record a completed run, and return its id."""
    with catalog.record_run(
        stage=stage,
        stage_key=digest_bytes(f"{stage} {sorted(inputs)} {sorted(outputs)} {seed}".encode()),
        parameters=parameters or {},
        inputs={name: made.artifact_id for name, made in inputs.items()},
        code_fingerprint=digest_bytes(stage.encode()),
        seed=seed,
    ) as run:
        run.mlflow_run_id = mlflow_run_id
        _fill(run, outputs, tables or {})
    return run.run_id


def _fill(run: RunRecorder, outputs: Mapping[str, Artifact], tables: Mapping[str, list[dict[str, Any]]]) -> None:
    for name, made in outputs.items():
        run.output(name, made)
    for table, rows in tables.items():
        run.append(table, rows)


def make_home(home: Home) -> dict[str, str]:
    """Fill a home with one evaluation, its trainings and another one; returns the run of each stage."""
    catalog = Catalog(home)
    catalog.register(MODEL)
    catalog.append("models", [MODEL_ROW])
    runs = {f"prompts {s}": record(catalog, "prompts", {"model": MODEL}, {"prompts": p}) for s, p in PROMPTS.items()}
    read = {"model": MODEL, "prompts_train": PROMPTS["train"]}
    runs["collect"] = record(catalog, "collect", read, {"snapshot": SNAPSHOT})
    for policy, objective, seed, final in (
        (POLICIES[0], "exact", 0, 1.3),
        (POLICIES[1], "exact", 1, 1.4),
        (OTHER_POLICY, "mse", 0, 1.8),
    ):
        runs[f"train {policy.name}"] = _train(catalog, policy, objective, seed, final)
    evaluated = {"model": MODEL, "prompts": PROMPTS["test"], **{f"policy_{i}": p for i, p in enumerate(POLICIES)}}
    runs["shard"] = record(catalog, "evaluate-shard", evaluated, {"shard": SHARD}, {"samples": list(sample_rows())})
    curves = {row["curve_id"]: row for row in curve_rows()}
    made = {
        f"curve {row['method']} {row['seed']}": artifact("curve", f"ruler {row['method']} {row['seed']}")
        for row in curves.values()
    }
    runs["evaluate"] = record(
        catalog,
        "evaluate",
        {**evaluated, "shard_0000 kvp 0": SHARD},
        {"evaluation": EVALUATION, **made},
        {
            "curves": list(curve_rows()),
            "comparisons": [*comparison_rows(), *comparison_rows(metric="string_match")],
            "scores": list(score_rows()),
            "head_costs": list(head_cost_rows()),
            "findings": list(finding_rows()),
        },
        parameters={"evaluate": EVALUATE, "dtype": "float32"},
        mlflow_run_id=mlflow_id("evaluation"),
    )
    return runs


def _train(catalog: Catalog, policy: Artifact, objective: str, seed: int, final: float) -> str:
    read = {"model": MODEL, "snapshot": SNAPSHOT}
    parameters = {
        "train": {
            "objective": objective,
            "num_steps": 20,
            "batch_sequences": 2,
            "learning_rate": 0.005,
            "agent": {"width": 64},
        }
    }
    group = artifact("head_group", f"{objective} {seed}")
    record(catalog, "train-heads", read, {"group": group}, parameters=parameters, seed=seed)
    tables = {
        "heads": head_rows(policy),
        "metrics": list(metric_rows(policy, final)),
        "head_pairs": pair_rows(policy),
    }
    return record(
        catalog, "train", {**read, "group_000": group}, {"policy": policy}, tables, parameters=parameters, seed=seed
    )
