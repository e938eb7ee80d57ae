"""What a person or a schedule may choose on top of a preset."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvpolicy.benchmarks.sources import absolute_entry
from kvpolicy.errors import InputError
from kvpolicy.pipeline import PipelineConfig, load_preset
from kvpolicy.policies.agent import AgentConfig

Preset = Literal["smoke", "demo", "study", "paper"]
RunnerName = Literal["local", "processes", "ray", "dask"]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Choices on top of a preset; None keeps the preset's.

    Attributes:
        tasks: Tasks of the benchmark.
        methods: Methods that take part.
        budgets: Entries kept per KV head, in tokens.
        agent: Agents to train: `default`, `small` or `paper`.
        objective: Training objective: `exact`, `rloo` or a supervised surrogate.
        compression: Of the stored traces: `none`, `zstd` or `shuffled_zstd`.
        stored_dtype: Of stored keys and values: `model` or `float8_e4m3fn`.
        data: Outside files for the tasks that need them, as `source=path` entries.
        language: Code of the one language of dialogues.
        settings: Any other field of the configuration, as `section.field=value` entries.
    """

    tasks: list[str] | None = None
    methods: list[str] | None = None
    budgets: list[int] | None = None
    agent: str | None = None
    objective: str | None = None
    compression: str | None = None
    stored_dtype: str | None = None
    data: list[str] | None = None
    language: str | None = None
    settings: list[str] | None = None

    def configure(self, preset: str) -> PipelineConfig:
        """The preset with the choices made.

        Raises:
            InputError: If the preset is unknown or a choice is wrong.
        """
        changes: dict[str, dict[str, Any]] = {
            "prompts": {
                "tasks": _tuple(self.tasks),
                "data": _tuple(self.data and [absolute_entry(entry) for entry in self.data]),
                "language": self.language,
            },
            "collect": {"compression": self.compression, "stored_dtype": self.stored_dtype},
            "evaluate": {
                "methods": _tuple(self.methods),
                "budgets": _tuple(self.budgets and sorted(self.budgets)),
            },
            "train": {"objective": self.objective, "agent": self.agent and AgentConfig.named(self.agent)},
        }
        given = {
            section: {key: value for key, value in part.items() if value is not None}
            for section, part in changes.items()
        }
        return load_preset(preset).with_changes(given).with_settings(self.settings or [])


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Where the parts of stages run (fragments, head groups, shards). No result and no request depends on it.

    Attributes:
        name: `local`, one after the other in the flow's process; `processes` of this machine; `ray` or `dask`.
        address: Of a cluster that is there; without one, Ray and Dask start on this machine for the run.
        num_workers: Parts that run at once on this machine; by default as many as leave no core idle, at least two.
    """

    name: RunnerName = "local"
    address: str | None = None
    num_workers: int | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InputError: Naming what is wrong, and what was expected.
        """
        if self.name not in get_args(RunnerName):
            raise InputError(f"runner is {self.name!r}, expected one of {', '.join(get_args(RunnerName))}")
        if self.address is not None and self.name not in ("ray", "dask"):
            raise InputError(
                f"runner {self.name} has no address, got {self.address!r}: leave it out, or use ray or dask"
            )
        if self.num_workers is not None and (self.num_workers < 1 or self.name == "local" or self.address):
            raise InputError(
                f"runner {self.name} has {self.num_workers} workers, expected 1 or more, and only where they start on "
                "this machine: processes, or ray or dask without an address"
            )


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)
