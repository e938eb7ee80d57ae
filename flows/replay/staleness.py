"""What a request would do again now, and why: the record compared with the code, presets, texts and models of now.

Nothing is run, fetched or written, and of a model only the tokenizer is loaded. What is lost is only made again, the
same, so stages after it stay as they are; what is made again for another reason counts as another input of the stages
after it.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.request import Request
from flows.stages import STAGES
from kvpolicy.digests import canonical_json, short_id
from kvpolicy.errors import InputError
from kvpolicy.models.tokenizer import load_tokenizer
from kvpolicy.names import SPLITS
from kvpolicy.presets.pipeline_config import PipelineConfig
from kvpolicy.text.chat_format import rendered_formats
from storage.catalog.catalog import Catalog
from storage.catalog.requests import RequestRecord, StageName, StageRun
from storage.catalog.run_differences import flat, recorded_modules
from storage.errors import StorageError
from storage.home import Home
from tasks.framework.references import ModelRef
from tasks.framework.stage import Stage, find_completed, has_lost_tracking, lost_results
from tasks.framework.work import Plan, Work, stage_name
from tasks.model import find
from tasks.prompts import PromptsWork

LABELS = {kind.name: kind.label for kind in STAGES}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why a stage would run again.

    Attributes:
        kind: `code`, `parameter`, `input`, or `result`: what it made is lost or damaged.
        name: Module, path of the parameter, role of the input, or artifact.
        recorded: What it was; None if there was none.
        now: What it is; None if there is none.
    """

    kind: str
    name: str
    recorded: Any
    now: Any


@dataclass(frozen=True, kw_only=True)
class StaleStage:
    """A stage that would run again, with one of the causes.

    Attributes:
        stage: The stage; for prompts with their split.
        run: Its newest run.
        made: What that made.
        request: The request that would run it again.
        cause: Why.
    """

    stage: str
    run: str
    made: str
    request: str
    cause: Cause

    def to_record(self) -> dict[str, Any]:
        """The row that is printed."""
        shown = {name: getattr(self, name) for name in ("stage", "run", "made")}
        return {**shown, **dataclasses.asdict(self.cause), "request": self.request}


def stale_stages(home: Home, requests: Sequence[RequestRecord]) -> list[StaleStage]:
    """All stages that their requests would run again; one that several requests share is named once.

    Raises:
        InputError: If a request cannot be understood by this release.
        StorageError: If the catalog cannot be read.
    """
    stale_by_cause: dict[tuple[Any, ...], StaleStage] = {}
    for record in requests:
        for stale in _Check(home, record).stale():
            stale_by_cause.setdefault((stale.run, stale.cause.kind, stale.cause.name, str(stale.cause.now)), stale)
    return list(stale_by_cause.values())


class _Check:
    """One request, checked stage by stage: what each would read now follows from the stages before it."""

    def __init__(self, home: Home, record: RequestRecord) -> None:
        self._home, self._record, self._catalog = home, record, Catalog(home)
        self._request = Request.from_artifact(record.artifact)
        self._made: dict[StageName, str] = {}  # by what is there now, or else by the newest run
        self._renewed: set[StageName] = set()

    def stale(self) -> Iterator[StaleStage]:
        """Check the stages in the order in which they run, each as far as those before it have ever made anything."""
        config, texts, problems = self._configured_now()
        model, formats, lost = self._model_now(config)
        plan = Plan(
            home=self._home,
            config=config,
            seed=self._request.seed,
            model=model,
            texts=texts,
            formats={split: self._formats_recorded(split) if formats is None else formats for split in SPLITS},
        )
        for kind in STAGES:
            for work in kind.planned(plan):
                yield from self._check(work, plan, [*problems, *lost] if kind is PromptsWork else lost)

    def _check(self, work: Work, plan: Plan, problems: Sequence[Cause]) -> Iterator[StaleStage]:
        """Yield why a stage would run again, and note what the stages after it would read."""
        name, stage = stage_name(work), work.stage
        makers = {artifact_id: before for before, artifact_id in self._made.items()}
        reads = {role: makers[artifact_id] for role, artifact_id in stage.inputs.items() if artifact_id in makers}
        run = self._record.runs.get(name)
        renewed = {role: before for role, before in reads.items() if before in self._renewed}
        current = None if renewed or problems else find_completed(self._home, stage)
        known = current or (run and run.known)
        if known is None:
            return
        self._made[name] = known.outputs[work.result]
        plan.made[name] = work.refer(self._home, self._made[name], self._request.seed)
        if current is not None or run is None:
            return
        causes = [
            *problems,
            *_changes(self._catalog, stage, run),
            *_other_inputs(stage, run, renewed),
            *self._losses(stage, run),
        ]
        if any(cause.kind != "result" for cause in causes):
            self._renewed.add(name)
        artifact = self._catalog.artifact(self._made[name])
        for cause in causes:
            yield StaleStage(
                stage=_label(name),
                run=run.known.run_id,
                made=f"{artifact.artifact_id} ({artifact.name})",
                request=self._record.artifact.artifact_id,
                cause=cause,
            )

    def _losses(self, stage: Stage, run: StageRun) -> Iterator[Cause]:
        for artifact in lost_results(self._home, run.known, rests_on=stage.rests_on):
            yield Cause(kind="result", name=artifact.artifact_id, recorded=artifact.uri, now="lost or damaged")
        if has_lost_tracking(self._home, run.known):
            yield Cause(kind="result", name="MLflow run", recorded=run.known.mlflow_run_id, now="lost")

    def _configured_now(self) -> tuple[PipelineConfig, Mapping[str, str], list[Cause]]:
        """The configuration that preset and choices give now, the digests of outside texts, and what is wrong there."""
        config = self._request.config
        try:
            texts = config.prompts.find_files(fetch=False).digests()  # a preset has no others than the choices name
        except InputError as error:
            return config, {}, [Cause(kind="input", name="texts", recorded="read", now=str(error))]
        try:
            return self._request.choices.configure(config.preset), texts, []
        except InputError as error:
            version = f"{config.preset}, version {config.version}"
            return config, texts, [Cause(kind="parameter", name="preset", recorded=version, now=str(error))]

    def _formats_recorded(self, split: str) -> Mapping[str, Any]:
        run = self._record.runs.get(("prompts", split))
        formats: Mapping[str, Any] = run.parameters.get("formats", {}) if run else {}
        return formats

    def _model_now(self, config: PipelineConfig) -> tuple[ModelRef, Mapping[str, Any] | None, list[Cause]]:
        """The model that would be read now, and what its chat template renders.

        A model that would have to be fetched first is taken to be the same, and to render the same (None).
        """
        recorded = next(iter(self._record.runs.values())).known.inputs["model"]
        artifact_id, formats, problems = recorded, None, []
        try:
            reference = find(self._home, self._request.model)
            if reference is not None:
                artifact_id = short_id("model", reference.digest)
                formats = rendered_formats(load_tokenizer(reference.folder))
        except (InputError, StorageError) as error:
            problems = [Cause(kind="input", name="model", recorded=recorded, now=str(error))]
        model = ModelRef(artifact_id=artifact_id, digest="", name="", folder="", dtype=config.dtype, num_heads=0)
        return model, formats, problems


def _changes(catalog: Catalog, stage: Stage, run: StageRun) -> Iterator[Cause]:
    """Modules and parameters that are not what they were."""
    recorded = recorded_modules(catalog, run.known)
    code = dict(stage.modules) if recorded else {"code_fingerprint": stage.code}
    before = recorded or {"code_fingerprint": run.row["code_fingerprint"]}
    for name in sorted({*code, *before}):
        if before.get(name) != code.get(name):
            yield Cause(kind="code", name=name, recorded=before.get(name), now=code.get(name))
    given, now = dict(flat(run.parameters)), dict(flat(json.loads(canonical_json(stage.parameters))))
    for name in dict.fromkeys([*given, *now]):
        if given.get(name) != now.get(name):
            kind = "input" if name.partition(".")[0] == "texts" else "parameter"
            yield Cause(kind=kind, name=name, recorded=given.get(name), now=now.get(name))


def _other_inputs(stage: Stage, run: StageRun, renewed: Mapping[str, StageName]) -> Iterator[Cause]:
    for role, artifact_id in stage.inputs.items():
        now = f"{_label(renewed[role])} is out of date" if role in renewed else artifact_id
        if now != run.known.inputs.get(role):
            yield Cause(kind="input", name=role, recorded=run.known.inputs.get(role), now=now)


def _label(name: StageName) -> str:
    return " ".join(filter(None, name))
