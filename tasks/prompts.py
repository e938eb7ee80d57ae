"""Prompts: generating the samples of a split, once."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvpolicy.benchmarks.prompt_set import PromptConfig, generate_samples
from kvpolicy.benchmarks.registry import BENCHMARKS
from kvpolicy.config.registry import Choice
from kvpolicy.digests import digest_json
from kvpolicy.errors import InputError
from kvpolicy.names import SPLITS
from kvpolicy.presets.pipeline_config import PipelineConfig
from kvpolicy.text.chat_format import rendered_formats
from kvpolicy.text.sample import Sample
from storage.catalog.catalog import Artifact, RunRecorder
from storage.home import Home
from storage.tables.parquet import write_rows
from tasks.framework.progress import LOGGER
from tasks.framework.references import ModelRef, PromptsRef, prompts_ref
from tasks.framework.stage import Stage, StageOutcome, run_stage, stage_task
from tasks.framework.wholeness import are_readable, check_files, declare_kind
from tasks.framework.work import Plan, Record, Work
from tasks.inputs.loaded_model import load_model

declare_kind("prompts", check_files(are_readable()))


def prompts_stage(
    model: ModelRef,
    config: PromptConfig,
    *,
    texts: Mapping[str, str],
    formats: Mapping[str, Any],
    split: str,
    num_samples_per_task: int,
    seed: int,
) -> Stage:
    """The stage of one split's prompts.

    Args:
        model: Whose tokens are counted.
        config: What the prompts are about.
        texts: Digests of the outside files that the configuration names.
        formats: What the model's chat template renders (`kvpolicy.text.chat_format.rendered_formats`).
        split: `train`, `validation` or `test`.
        num_samples_per_task: Samples of each task.
        seed: Of the set.
    """
    parameters = {
        "prompts": dataclasses.asdict(config),
        "texts": dict(texts),
        "formats": dict(formats),
        "split": split,
        "num_samples_per_task": num_samples_per_task,
    }
    return Stage(
        name="prompts",
        module=__name__,
        inputs={"model": model.artifact_id},
        parameters=parameters,
        choices=BENCHMARKS.choices(config.benchmarks),
        seed=seed,
    )


@stage_task("write-prompts")
def write_prompts(
    home: Home,
    model: ModelRef,
    config: PromptConfig,
    *,
    texts: Mapping[str, str],
    formats: Mapping[str, Any],
    split: str,
    num_samples_per_task: int,
    seed: int,
) -> tuple[PromptsRef, StageOutcome]:
    """Generate the prompts of a split; their lengths are counted in the model's tokens. Arguments as `prompts_stage`.

    Raises:
        InputError: If a task does not fit in the length, or a file that it needs is missing, broken or too small.
    """
    stage = prompts_stage(
        model,
        config,
        texts=texts,
        formats=formats,
        split=split,
        num_samples_per_task=num_samples_per_task,
        seed=seed,
    )

    def body(run: RunRecorder) -> None:
        made = generate_samples(
            config,
            split=split,
            num_samples_per_task=num_samples_per_task,
            seed=seed,
            tokenizer=load_model(model).tokenizer,
        )
        samples = made.samples
        if made.reported:
            reasons = "; ".join(f"{reason}: {count}" for reason, count in made.reported.items())
            LOGGER.info("%s prompts, not taken or not as asked for: %s", split, reasons)
        used = _used_formats(samples, formats)
        for form in used.values():
            if form["note"]:
                kind = "in the chat format" if form["is_chat"] else "in the plain format, without chat turns"
                LOGGER.warning("%s prompts are %s: %s", split, kind, form["note"])
        # The tokens of prompts follow from their texts and the format: another format makes another set. The benchmarks
        # are in it so that no set of an earlier release, which did not record them, is taken for this one.
        content = {"samples": [sample.digest() for sample in samples], "formats": formats}
        digest = digest_json({**content, "benchmarks": config.benchmarks})
        path = home.prompts / f"{digest[:16]}.parquet"
        write_rows(path, [dataclasses.asdict(sample) for sample in samples])
        metadata = {"split": split, "num_samples": len(samples), "reported": dict(made.reported), "formats": used}
        metadata |= {"formats_digest": digest_json(formats), "benchmarks": list(config.benchmarks)}
        name = f"{'+'.join(config.benchmarks)} {split}, {len(samples)} samples of up to {config.length_tokens} tokens"
        run.output("prompts", Artifact(kind="prompts", digest=digest, name=name, uri=str(path), metadata=metadata))

    outcome = run_stage(home, stage, body, note_skip=False)
    return prompts_ref(home, outcome.outputs["prompts"], seed=seed), outcome


def _used_formats(samples: Sequence[Sample], formats: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Whether each of the formats that some samples need is the model's chat format, and why not."""
    kinds = {"dialogue" if sample.context_turns else "prompt" for sample in samples}
    return {kind: {name: formats[kind][name] for name in ("is_chat", "note")} for kind in sorted(kinds)}


@dataclass(frozen=True, kw_only=True)
class PromptsWork(Work):
    """The prompts of one split."""

    name: ClassVar[str] = "prompts"
    result: ClassVar[str] = "prompts"
    one_per: ClassVar[str] = "split"
    refer = staticmethod(prompts_ref)

    home: Home
    model: ModelRef
    config: PromptConfig
    texts: Mapping[str, str]
    formats: Mapping[str, Any]
    split: str
    num_samples_per_task: int
    seed: int

    @property
    def stage(self) -> Stage:
        """The stage."""
        return prompts_stage(
            self.model,
            self.config,
            texts=self.texts,
            formats=self.formats,
            split=self.split,
            num_samples_per_task=self.num_samples_per_task,
            seed=self.seed,
        )

    @classmethod
    def planned(cls, plan: Plan) -> Iterator[Self]:
        """One a split."""
        for split in SPLITS:
            config, count = plan.config.prompts_of(split)
            yield cls(
                home=plan.home,
                model=plan.model,
                config=config,
                texts=plan.texts,
                formats=plan.formats[split],
                split=split,
                num_samples_per_task=count,
                seed=plan.seed,
            )

    @classmethod
    def choices(cls, config: PipelineConfig, parameters: Mapping[str, Any]) -> tuple[Choice, ...]:
        """The benchmarks, of whatever split."""
        del parameters
        sets = [config.prompts_of(split)[0] for split in SPLITS]
        return BENCHMARKS.choices([name for prompts in sets for name in prompts.benchmarks])

    @classmethod
    def recorded(cls, record: Record) -> Self:
        """The recorded split, if its texts are what they were."""
        parameters = record.parameters
        config, _ = record.config.prompts_of(parameters["split"])
        now, before = config.find_files().digests(), parameters["texts"]
        if changed := sorted(path for path in {*now, *before} if now.get(path) != before.get(path)):
            raise InputError(f"text {changed[0]} is not what {record.known.run_id} read: put it back as it was")
        model = record.model()
        return cls(
            home=record.home,
            model=model,
            config=config,
            texts=now,
            formats=rendered_formats(load_model(model).tokenizer),
            split=parameters["split"],
            num_samples_per_task=parameters["num_samples_per_task"],
            seed=record.seed,
        )

    def finish(self, made: Sequence[Any]) -> tuple[PromptsRef, StageOutcome]:
        """Write them."""
        written: tuple[PromptsRef, StageOutcome] = write_prompts(
            self.home,
            self.model,
            self.config,
            texts=self.texts,
            formats=self.formats,
            split=self.split,
            num_samples_per_task=self.num_samples_per_task,
            seed=self.seed,
        )
        return written
