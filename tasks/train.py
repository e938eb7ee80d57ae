"""Training: one task a group of heads, and one that joins the groups into a policy set."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from kvpolicy.analysis.heads import HeadShapes
from kvpolicy.config.registry import Choice
from kvpolicy.names import HELDOUT_SPLIT, TRAINING_SPLIT
from kvpolicy.objectives.registry import OBJECTIVES
from kvpolicy.policies.agent import BatchedAgents
from kvpolicy.policies.policy_set import PolicySet, join_agents, load_policy
from kvpolicy.presets.pipeline_config import PipelineConfig
from kvpolicy.training.policy_training import StepRecord, TrainConfig, train_agents
from storage.catalog.catalog import Artifact, Catalog, RunRecorder
from storage.home import Home
from storage.mlflow.tracking import DatasetRef, Tracking
from storage.traces.store import TraceStore
from tasks.framework.progress import progress
from tasks.framework.references import ModelRef, SnapshotRef, TrainedRef, snapshot_ref, trained_ref
from tasks.framework.stage import Stage, StageOutcome, run_stage, stage_task
from tasks.framework.work import Part, Plan, Record, Work, slices
from tasks.head_shapes import head_pair_rows, read_head_shapes, shape_of_head
from tasks.inputs.stored_traces import shuffled_batches, single_batches, snapshot_rows
from tasks.inputs.trained import save_trained
from tasks.memory import freed_memory_kept
from tasks.model import model_spec
from tasks.registration import register_policy_set
from tasks.training_memory import training_bytes


def training_stage(model: ModelRef, snapshot: SnapshotRef, config: TrainConfig, *, seed: int) -> Stage:
    """The stage of a whole training."""
    return Stage(
        name="train",
        module=__name__,
        inputs={"model": model.artifact_id, "snapshot": snapshot.artifact_id},
        parameters={"train": dataclasses.asdict(config)},
        choices=OBJECTIVES.choices([config.objective]),
        seed=seed,
    )


@stage_task("train-heads")
def train_heads(
    home: Home, model: ModelRef, snapshot: SnapshotRef, config: TrainConfig, *, heads: tuple[int, int], seed: int
) -> StageOutcome:
    """Train the agents of consecutive heads at once.

    Args:
        home: The home.
        model: The model that the traces are of.
        snapshot: The traces.
        config: How to train.
        heads: First head, and the one after the last.
        seed: Of weights, order and noise.
    """
    stage = Stage(
        name="train-heads",
        module=__name__,
        inputs={"model": model.artifact_id, "snapshot": snapshot.artifact_id},
        parameters={"train": dataclasses.asdict(config), "heads": list(heads)},
        choices=OBJECTIVES.choices([config.objective]),
        seed=seed,
    )

    def body(run: RunRecorder) -> None:
        agents, cost, records = _train_group(home, model, snapshot, config, heads=heads, seed=seed)
        count = heads[1] - heads[0]
        spec = dataclasses.replace(model_spec(home, model), num_layers=1, num_kv_heads=count, num_query_heads=count)
        training = {"first_head": heads[0], "seed": seed}
        group = PolicySet(agents=agents, spec=spec, model_digest=model.digest, training=training)
        artifact = save_trained(home, group, f"heads {heads[0]} to {heads[1] - 1}", kind="head_group")
        metadata = {"heldout_cost": cost, "records": [_plain(record) for record in records]}
        run.output("group", dataclasses.replace(artifact, metadata=metadata))

    return run_stage(home, stage, body, note_skip=False)


def _train_group(
    home: Home, model: ModelRef, snapshot: SnapshotRef, config: TrainConfig, *, heads: tuple[int, int], seed: int
) -> tuple[BatchedAgents, list[float], list[StepRecord]]:
    """Train on the traces of a snapshot; returns the agents, the held-out cost of each, and what every step said."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    store, kept = TraceStore(home.traces), slice(*heads)
    rows = snapshot_rows(store, snapshot)
    training, heldout = ([row for row in rows if row.split == split] for split in (TRAINING_SPLIT, HELDOUT_SPLIT))
    batches = shuffled_batches(store, training, kept, batch_sequences=config.batch_sequences, seed=seed, device=device)
    records: list[StepRecord] = []
    with closing(batches), freed_memory_kept(), progress("train", config.num_steps, "steps") as advance:

        def on_step(record: StepRecord) -> None:
            records.append(record)
            cost, num_heads = record.heldout_cost, heads[1] - heads[0]
            words = [f"loss {record.loss:.3f}"]
            words += [] if cost is None else [f"held-out cost {cost.mean():.3f}"]
            words += [f"{record.heads_at_once} heads at once for want of memory"] * (record.heads_at_once < num_heads)
            advance(", ".join(words))

        agents, cost = train_agents(
            batches,
            config,
            num_heads=heads[1] - heads[0],
            head_dim=model_spec(home, model).head_dim,
            heldout=lambda: single_batches(store, heldout, kept, device),
            seed=seed,
            device=device,
            on_step=on_step,
        )
    return agents, cost.tolist(), records


@stage_task("assemble-policy")
def assemble_policy(
    home: Home,
    model: ModelRef,
    snapshot: SnapshotRef,
    config: TrainConfig,
    groups: Sequence[str],
    *,
    seed: int,
) -> tuple[TrainedRef, StageOutcome]:
    """Join trained groups into a policy set, log its training and register it.

    Args:
        home: The home.
        model: The model.
        snapshot: The traces that all groups were trained on.
        config: How they were trained.
        groups: Artifact ids of the groups, in the order of their heads.
        seed: That they were trained with.
    """
    stage = dataclasses.replace(
        training_stage(model, snapshot, config, seed=seed),
        parts={f"group_{index:03d}": name for index, name in enumerate(groups)},
    )

    def body(run: RunRecorder) -> None:
        artifacts = [Catalog(home).artifact(name) for name in groups]
        cost = [value for artifact in artifacts for value in artifact.metadata["heldout_cost"]]
        agents = join_agents([load_policy(Path(artifact.uri)).agents for artifact in artifacts])
        training = {"objective": config.objective, "seed": seed, "trace_snapshot": snapshot.artifact_id}
        policy = PolicySet(agents=agents, spec=model_spec(home, model), model_digest=model.digest, training=training)
        artifact = save_trained(home, policy, f"{model.name}, {config.objective}, seed {seed}", kind="policy_set")
        artifact = dataclasses.replace(artifact, metadata={"heldout_cost": cost, "seed": seed})
        records = [artifact.metadata["records"] for artifact in artifacts]
        curves = _training_curves(records, [len(artifact.metadata["heldout_cost"]) for artifact in artifacts])
        run.mlflow_run_id = _track(home, model, snapshot, config, artifact=artifact, curves=curves, seed=seed)
        policy_id = run.output("policy", artifact)
        shapes = read_head_shapes(home, snapshot, split=HELDOUT_SPLIT)
        of_policy = {"policy_set_id": policy_id, "model_digest": model.digest}
        run.append("heads", [of_policy | row for row in _head_rows(policy, shapes, cost, config.num_steps)])
        run.append("head_pairs", [of_policy | row for row in head_pair_rows(shapes)])
        run.append("head_curves", [of_policy | row for row in _head_curve_rows(policy, records)])
        run.append("metrics", [{"policy_set_id": policy_id, "step": s, "name": n, "value": v} for n, s, v in curves])

    outcome = run_stage(home, stage, body)
    policy = trained_ref(home, outcome.outputs["policy"])
    register_policy_set(
        home,
        policy.artifact_id,
        model_id=model.artifact_id,
        snapshot_id=snapshot.artifact_id,
        run_id=outcome.mlflow_run_id,
    )
    return policy, outcome


def _plain(record: StepRecord) -> dict[str, Any]:
    cost = record.heldout_cost
    return {
        "step": record.step,
        "loss": record.loss,
        "gradient_norm": record.gradient_norm,
        "learning_rate": record.learning_rate,
        "heldout_cost": None if cost is None else float(cost.mean()),
        "head_costs": None if cost is None else cost.tolist(),
        "seconds": record.train_s,
    }


def _training_curves(groups: Sequence[Sequence[dict[str, Any]]], sizes: Sequence[int]) -> list[tuple[str, int, float]]:
    """(metric, step, value): the mean over heads, of groups that have so many; of seconds the sum over groups."""
    points = []
    for steps in zip(*groups, strict=True):
        step = int(steps[0]["step"])
        for name in ("loss", "gradient_norm", "learning_rate", "heldout_cost"):
            if steps[0][name] is not None:  # all groups measure at the same steps
                total = sum(group[name] * size for group, size in zip(steps, sizes, strict=True))
                points.append((name, step, total / sum(sizes)))
        points.append(("seconds", step, sum(group["seconds"] for group in steps)))
    return points


def _track(
    home: Home,
    model: ModelRef,
    snapshot: SnapshotRef,
    config: TrainConfig,
    *,
    artifact: Artifact,
    curves: Sequence[tuple[str, int, float]],
    seed: int,
) -> str:
    """Log the training to MLflow; returns the run."""
    tracking = Tracking(home)
    tags = {
        "kvp.stage": "train",
        "kvp.model_id": model.artifact_id,
        "kvp.trace_snapshot_id": snapshot.artifact_id,
        "kvp.policy_set_id": artifact.artifact_id,
    }
    # Logging again what is the same must find the same run, so its time is that of its snapshot.
    timestamp_ms = Catalog(home).created_at_ms(snapshot.artifact_id)
    run_id = tracking.start_parent(
        experiment=model.name,
        name=f"train {config.objective} seed {seed}",
        tags=tags,
        params={"objective": config.objective, "num_steps": str(config.num_steps), "seed": str(seed)},
        timestamp_ms=timestamp_ms,
        datasets=[
            DatasetRef(
                name="trace_snapshot", digest=Catalog(home).artifact(snapshot.artifact_id).digest, context="training"
            )
        ],
    )
    tracking.log_training(run_id, list(curves), timestamp_ms=timestamp_ms)
    tracking.finish(run_id, timestamp_ms=timestamp_ms)
    return run_id


def _head_rows(policy: PolicySet, shapes: HeadShapes, cost: Sequence[float], num_steps: int) -> list[dict[str, Any]]:
    spec = policy.spec
    return [
        {
            "head": head,
            "head_name": spec.head_name(head),
            "layer": head // spec.num_kv_heads,
            "kv_head": head % spec.num_kv_heads,
            "heldout_cost": value,
            "steps": num_steps,
            **shape_of_head(shapes, head),
        }
        for head, value in enumerate(cost)
    ]


def _head_curve_rows(policy: PolicySet, groups: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What each head's ranking cost at the steps that measured it."""
    return [
        {"head": head, "head_name": policy.spec.head_name(head), "step": int(steps[0]["step"]), "heldout_cost": cost}
        for steps in zip(*groups, strict=True)
        if steps[0]["head_costs"] is not None
        for head, cost in enumerate(cost for group in steps for cost in group["head_costs"])
    ]


def _repeat_heads(record: Record) -> StageOutcome:
    first, stop = record.parameters["heads"]
    snapshot = snapshot_ref(record.home, record.artifact("snapshot", rests_on="trace_fragment").artifact_id)
    outcome: StageOutcome = train_heads(
        record.home, record.model(), snapshot, record.config.train, heads=(first, stop), seed=record.own_seed
    )
    return outcome


@dataclass(frozen=True, kw_only=True)
class TrainingWork(Work):
    """A policy set of one seed: every head is trained, group by group.

    The groups are the configuration's under every runner: another grouping would give other agents.
    """

    name: ClassVar[str] = "train"
    title: ClassVar[str] = "train"
    result: ClassVar[str] = "policy"
    one_per: ClassVar[str] = "seed"
    refer = staticmethod(trained_ref)
    part_kinds: ClassVar[Mapping[str, Part]] = {"train-heads": Part(module=__name__, repeat=_repeat_heads)}

    home: Home
    model: ModelRef
    snapshot: SnapshotRef
    config: TrainConfig
    seed: int

    @property
    def stage(self) -> Stage:
        """The stage."""
        return training_stage(self.model, self.snapshot, self.config, seed=self.seed)

    @classmethod
    def planned(cls, plan: Plan) -> Iterator[Self]:
        """One a seed."""
        snapshot: Any = plan.made.get(("collect", ""))
        for seed in plan.policy_seeds if snapshot else ():
            yield cls(home=plan.home, model=plan.model, snapshot=snapshot, config=plan.config.train, seed=seed)

    @classmethod
    def recorded(cls, record: Record) -> Self:
        """The recorded training."""
        snapshot = snapshot_ref(record.home, record.artifact("snapshot", rests_on="trace_fragment").artifact_id)
        return cls(
            home=record.home,
            model=record.model(),
            snapshot=snapshot,
            config=record.config.train,
            seed=record.own_seed,
        )

    @classmethod
    def choices(cls, config: PipelineConfig, parameters: Mapping[str, Any]) -> tuple[Choice, ...]:
        """The objective."""
        del parameters
        return OBJECTIVES.choices([config.train.objective])

    @classmethod
    def count_parts(cls, plan: Plan) -> int:
        """The groups of all seeds."""
        return len(_groups(plan.model, plan.config.train)) * len(plan.policy_seeds)

    def parts(self) -> "list[partial[Any]]":
        """Each group of heads."""
        given = (self.home, self.model, self.snapshot, self.config)
        return [partial(train_heads, *given, heads=heads, seed=self.seed) for heads in _groups(self.model, self.config)]

    def gpu_bytes(self) -> int:
        """Memory of a group, by the longest of the traces."""
        longest = max(row.context_tokens for row in snapshot_rows(TraceStore(self.home.traces), self.snapshot))
        head_dim = model_spec(self.home, self.model).head_dim
        size = self.config.heads_per_group or self.model.num_heads
        return training_bytes(self.config, num_heads=size, head_dim=head_dim, longest_tokens=longest)

    def finish(self, made: Sequence[StageOutcome]) -> tuple[TrainedRef, StageOutcome]:
        """Join the groups."""
        groups = [outcome.outputs["group"] for outcome in made]
        assembled: tuple[TrainedRef, StageOutcome] = assemble_policy(
            self.home, self.model, self.snapshot, self.config, groups, seed=self.seed
        )
        return assembled


def _groups(model: ModelRef, config: TrainConfig) -> list[tuple[int, int]]:
    """First head of each group, and the one after its last."""
    return slices(model.num_heads, config.heads_per_group or model.num_heads)
