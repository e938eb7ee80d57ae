"""Collecting traces: one task a fragment, and one that seals the fragments into a snapshot to train on."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch

from kvpolicy.models.language_model import LanguageModel
from kvpolicy.names import HELDOUT_SPLIT, TRAINING_SPLIT
from kvpolicy.text.encoded_sample import EncodedSample
from kvpolicy.text.protocol import cut_sample
from kvpolicy.training.collection import CollectConfig, collect_trace
from storage.catalog.catalog import Artifact, RunRecorder
from storage.home import Home
from storage.traces.store import TraceSample, TraceStore
from tasks.framework.progress import progress
from tasks.framework.references import ModelRef, PromptsRef, SnapshotRef, prompts_ref, snapshot_ref
from tasks.framework.stage import Stage, StageOutcome, run_stage, stage_task
from tasks.framework.wholeness import declare_kind
from tasks.framework.work import Part, Plan, Record, Work
from tasks.inputs.loaded_model import load_model
from tasks.inputs.samples import read_encoded, sample_row

LEARNED_SPLITS = (TRAINING_SPLIT, HELDOUT_SPLIT)


def collection_stage(model: ModelRef, prompts: Sequence[PromptsRef], config: CollectConfig) -> Stage:
    """The stage of a whole collection; its key names the collection in the trace store."""
    return Stage(
        name="collect",
        module=__name__,
        inputs={"model": model.artifact_id, **{f"prompts_{part.split}": part.artifact_id for part in prompts}},
        parameters={"dtype": model.dtype, "setting": config.setting, "stored_dtype": config.stored_dtype},
        rests_on="trace_fragment",
    )


@stage_task("collect-fragment")
def collect_fragment(
    home: Home, model: ModelRef, prompts: PromptsRef, config: CollectConfig, *, collection: str, first: int
) -> StageOutcome:
    """Run samples `first` to `first + samples_per_fragment` of a set, and publish their traces at once."""
    stop = min(first + config.samples_per_fragment, prompts.num_samples)
    stage = Stage(
        name="collect-fragment",
        module=__name__,
        inputs={"model": model.artifact_id, "prompts": prompts.artifact_id},
        parameters={"collection": collection, "first": first, "stop": stop},
    )

    def body(run: RunRecorder) -> None:
        store = TraceStore(home.traces, compression=config.compression)
        samples = read_encoded(prompts, model, slice(first, stop))
        keys, values, importance = collect_traces(load_model(model), samples, config)
        written = store.write_fragment(
            collection=collection,
            model_digest=model.digest,
            samples=[_trace_sample(sample, config.setting, prompts.seed) for sample in samples],
            keys=keys,
            values=values,
            importance=importance,
        )
        run.append("samples", [sample_row(sample, config.setting, prompts, model, collection) for sample in samples])
        for number, fragment in enumerate(written.fragments, start=1):
            artifact = Artifact(
                kind="trace_fragment",
                digest=fragment.fragment_id,
                name=f"{fragment.num_samples} {prompts.split} samples, {fragment.num_tokens} tokens",
                uri=store.uri_of(fragment.fragment_id),
                metadata={"num_bytes": fragment.num_bytes, "num_tokens": fragment.num_tokens},
            )
            run.output("fragment" if number == 1 else f"fragment_{number}", artifact)

    return run_stage(home, stage, body, note_skip=False)


@stage_task("seal-collection")
def seal_collection(
    home: Home, model: ModelRef, stage: Stage, config: CollectConfig, fragments: Sequence[str]
) -> tuple[SnapshotRef, StageOutcome]:
    """Take the snapshot of a collection whose fragments are all there.

    Args:
        home: The home.
        model: The model.
        stage: The collection's stage; its key names the collection.
        config: What was collected.
        fragments: Artifact ids of the fragments.
    """
    collection = stage.key
    whole = dataclasses.replace(
        stage, parts={f"fragment_{index:05d}": name for index, name in enumerate(dict.fromkeys(fragments))}
    )

    def body(run: RunRecorder) -> None:
        snapshot = TraceStore(home.traces).snapshot(collection)
        artifact = Artifact(
            kind="trace_snapshot",
            digest=snapshot.digest,
            name=f"{len(snapshot.rows)} samples of {model.name}",
            uri=home.traces,
            metadata={
                "collection": collection,
                "manifest_version": snapshot.manifest_version,
                "setting": config.setting,
                "num_samples": len(snapshot.rows),
            },
        )
        run.output("snapshot", artifact)

    outcome = run_stage(home, whole, body)
    return snapshot_ref(home, outcome.outputs["snapshot"]), outcome


def collect_traces(
    model: LanguageModel, samples: Sequence[EncodedSample], config: CollectConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values (head, token, dim) and importance (head, token) of samples, end to end."""
    spec = model.spec
    total = sum(cut_sample(sample, config.setting).num_context for sample in samples)
    dtype = model.dtype if config.stored_dtype == "model" else getattr(torch, config.stored_dtype)
    keys = torch.empty(spec.num_heads, total, spec.head_dim, dtype=dtype)
    values = torch.empty_like(keys)
    importance = torch.empty(spec.num_heads, total)
    start = 0
    with progress("collect", len(samples), "samples") as advance:
        for sample in samples:
            trace = collect_trace(model, sample, config.setting, stored_dtype=config.stored_dtype)
            stop = start + trace.keys.shape[1]
            keys[:, start:stop], values[:, start:stop] = trace.keys, trace.values
            importance[:, start:stop] = trace.importance
            start = stop
            advance("")
    return keys, values, importance


def _trace_sample(example: EncodedSample, setting: str, seed: int) -> TraceSample:
    sample = example.sample
    return TraceSample(
        sample_id=sample.sample_id,
        benchmark=sample.benchmark,
        task=sample.task,
        split=sample.split,
        setting=setting,
        seed=seed,
        prompt_digest=sample.digest(),
        context_tokens=cut_sample(example, setting).num_context,
    )


def _find_lost_fragments(home: Home, artifacts: Sequence[Artifact]) -> list[Artifact]:
    """Fragments that are gone; there may be thousands, so none is read here (`kvp traces verify` reads them)."""
    by_id = {artifact.uri.rpartition("/")[2]: artifact for artifact in artifacts}
    return [by_id[fragment] for fragment in TraceStore(home.traces).missing(by_id)]


def _require_manifest(home: Home, artifacts: Sequence[Artifact]) -> list[Artifact]:
    """A snapshot lists fragments, which are looked for themselves; but the manifest has to be there."""
    del artifacts
    TraceStore(home.traces).version()
    return []


declare_kind("trace_fragment", _find_lost_fragments)
declare_kind("trace_snapshot", _require_manifest)


def _repeat_fragment(record: Record) -> StageOutcome:
    prompts = prompts_ref(record.home, record.artifact("prompts").artifact_id, seed=record.seed)
    outcome: StageOutcome = collect_fragment(
        record.home,
        record.model(),
        prompts,
        record.config.collect,
        collection=record.parameters["collection"],
        first=record.parameters["first"],
    )
    return outcome


@dataclass(frozen=True, kw_only=True)
class CollectionWork(Work):
    """The traces of the prompts that policies are trained and checked on, fragment by fragment."""

    name: ClassVar[str] = "collect"
    title: ClassVar[str] = "collect"
    result: ClassVar[str] = "snapshot"
    refer = staticmethod(snapshot_ref)
    part_kinds: ClassVar[Mapping[str, Part]] = {"collect-fragment": Part(module=__name__, repeat=_repeat_fragment)}

    home: Home
    model: ModelRef
    prompts: tuple[PromptsRef, ...]
    config: CollectConfig

    @property
    def stage(self) -> Stage:
        """The stage."""
        return collection_stage(self.model, self.prompts, self.config)

    @classmethod
    def planned(cls, plan: Plan) -> Iterator[Self]:
        """One, of the prompts of both splits."""
        prompts = [plan.made[name] for split in LEARNED_SPLITS if (name := ("prompts", split)) in plan.made]
        if len(prompts) == len(LEARNED_SPLITS):
            yield cls(home=plan.home, model=plan.model, prompts=tuple(prompts), config=plan.config.collect)

    @classmethod
    def recorded(cls, record: Record) -> Self:
        """The recorded collection."""
        artifacts = [record.artifact(f"prompts_{split}") for split in LEARNED_SPLITS]
        prompts = [prompts_ref(record.home, artifact.artifact_id, seed=record.seed) for artifact in artifacts]
        return cls(home=record.home, model=record.model(), prompts=tuple(prompts), config=record.config.collect)

    def parts(self) -> "list[partial[Any]]":
        """Each fragment."""
        key = self.stage.key
        return [
            partial(collect_fragment, self.home, self.model, prompts, self.config, collection=key, first=first)
            for prompts, first in self._fragments()
        ]

    def finish(self, made: Sequence[StageOutcome]) -> tuple[SnapshotRef, StageOutcome]:
        """Take the snapshot."""
        fragments = [name for outcome in made for name in outcome.outputs.values()]
        sealed: tuple[SnapshotRef, StageOutcome] = seal_collection(
            self.home, self.model, self.stage, self.config, fragments
        )
        return sealed

    def _fragments(self) -> list[tuple[PromptsRef, int]]:
        step = self.config.samples_per_fragment
        return [(prompts, first) for prompts in self.prompts for first in range(0, prompts.num_samples, step)]
