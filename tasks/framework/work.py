"""A stage, declared once: what it reads and makes, its parts, and how to run it, check it and repeat it.

Everything else that needs to know of stages derives it: the pipeline and its progress (`flows.stages`), `kvp stale`
(`flows.replay.staleness`), `kvp rerun` (`flows.replay.repetition`) and the runs of a request
(`storage.catalog.requests`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Self

from kvpolicy.config.registry import Choice
from kvpolicy.presets.pipeline_config import PipelineConfig
from storage.catalog.catalog import CompletedRun
from storage.catalog.requests import StageName
from storage.home import Home
from storage.lineage.artifacts import Artifact
from tasks.framework.references import ModelRef
from tasks.framework.stage import Stage, StageOutcome, loaded_code


@dataclass(kw_only=True)
class Plan:
    """What the stages of a request share, and what they have made so far.

    Attributes:
        home: The home.
        config: The configuration.
        seed: That was asked for.
        model: The model.
        texts: Digests of the outside files that prompts are made of.
        formats: Split to what the model's chat template renders (`kvpolicy.text.chat_format.rendered_formats`).
        made: Stage to the reference of its result.
    """

    home: Home
    config: PipelineConfig
    seed: int
    model: ModelRef
    texts: Mapping[str, str]
    formats: Mapping[str, Mapping[str, Any]]
    made: dict[StageName, Any] = field(default_factory=dict)

    @property
    def policy_seeds(self) -> range:
        """Seed of each policy set that is trained: the request's own, and those after it."""
        return range(self.seed, self.seed + self.config.evaluate.num_policy_seeds)


class Record(ABC):
    """A recorded run as it can be run again: what it read, checked to be there and what it was."""

    home: Home
    config: PipelineConfig
    parameters: Mapping[str, Any]
    known: CompletedRun
    seed: int
    own_seed: int

    @abstractmethod
    def model(self) -> ModelRef:
        """The model."""

    @abstractmethod
    def artifact(self, role: str, *, rests_on: str = "") -> Artifact:
        """What the run read in a role.

        Args:
            role: Of the input.
            rests_on: Kind of artifact of which it is only a list.

        Raises:
            InputError: If it is lost or damaged.
        """


@dataclass(frozen=True, kw_only=True)
class Part:
    """A kind of part of a stage, which runs by itself, perhaps on another machine.

    Attributes:
        module: Module whose code it is.
        repeat: Runs one again from its record.
    """

    module: str
    repeat: Callable[[Record], Any]


class Work(ABC):
    """A stage with all that it reads, about to run. A subclass declares one stage.

    Attributes:
        name: Of the stage in the catalog.
        title: Of the stage where progress is shown; empty where it has no parts to show.
        result: Name of the output that the stages after it read.
        one_per: What a request has several of, if it does: `seed`, or a parameter of the stage.
        part_kinds: Name to kind of the parts that have runs of their own.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    result: ClassVar[str]
    one_per: ClassVar[str] = ""
    part_kinds: ClassVar[Mapping[str, Part]] = {}

    home: Home

    @property
    @abstractmethod
    def stage(self) -> Stage:
        """Everything that the result depends on."""

    @classmethod
    @abstractmethod
    def planned(cls, plan: Plan) -> Iterator[Self]:
        """The stages of this kind in a plan, as far as what they read has been made."""

    @classmethod
    @abstractmethod
    def recorded(cls, record: Record) -> Self:
        """The stage that a recorded run was, to be run again.

        Raises:
            InputError: If something that it read is lost, or no longer what it was.
        """

    @staticmethod
    def refer(home: Home, artifact_id: str, seed: int) -> Any:
        """The reference of a result in the catalog; the seed is the request's."""
        del home, seed
        return artifact_id

    @classmethod
    def choices(cls, config: PipelineConfig, parameters: Mapping[str, Any]) -> tuple[Choice, ...]:
        """What a configuration chooses from registries for this stage, or for a part of it with such parameters."""
        del config, parameters
        return ()

    @classmethod
    def code_of(cls, stage: str, config: PipelineConfig, parameters: Mapping[str, Any]) -> Mapping[str, str]:
        """The code that the stage, or a part of it, runs now with such parameters."""
        part = cls.part_kinds.get(stage)
        return loaded_code(cls.__module__ if part is None else part.module, cls.choices(config, parameters))

    @classmethod
    def label(cls, parameters: Mapping[str, Any], seed: int | None) -> str:
        """What tells stages of this kind apart within a request; empty where there is only one."""
        if cls.one_per == "seed":
            return f"seed {seed}"
        return str(parameters[cls.one_per]) if cls.one_per else ""

    @classmethod
    def count_parts(cls, plan: Plan) -> int:
        """Parts of all stages of this kind in a plan, before any of them has run."""
        return sum(len(work.parts()) for work in cls.planned(plan))

    def parts(self) -> "list[partial[Any]]":
        """Calls of the tasks that make the parts; independent of each other."""
        return []

    def gpu_bytes(self) -> int | None:
        """Memory that a part takes of a GPU; None if it has one for itself."""
        return None

    @abstractmethod
    def finish(self, made: Sequence[Any]) -> tuple[Any, StageOutcome]:
        """Make the result of the parts, or find it again.

        Args:
            made: What each part returned; none if the result is there already.

        Returns:
            Its reference, and what became of the stage.
        """


def stage_name(work: Work) -> StageName:
    """The stage within its request."""
    stage = work.stage
    return work.name, work.label(stage.parameters, stage.seed)


def slices(count: int, size: int) -> list[tuple[int, int]]:
    """First and last, exclusive, of consecutive slices of so many things, each of at most one size."""
    return [(first, min(first + size, count)) for first in range(0, count, size)]


def checked(kinds: Sequence[type[Work]]) -> tuple[type[Work], ...]:
    """Return declarations of stages that are complete, each of a name of its own.

    Raises:
        TypeError: Naming everything that is missing or declared twice.
    """
    problems, seen = [], set[str]()
    for kind in kinds:
        missing = [name for name in ("name", "result") if not getattr(kind, name, "")]
        missing += sorted(getattr(kind, "__abstractmethods__", ()))
        problems += [f"{kind.__name__} declares no {name}" for name in missing]
        for name in (getattr(kind, "name", ""), *kind.part_kinds):
            problems += [f"{kind.__name__} declares {name!r}, which another one does"] if name in seen else []
            seen |= {name} - {""}
    if problems:
        raise TypeError(f"stages are not declared in full: {'; '.join(problems)}")
    return tuple(kinds)
