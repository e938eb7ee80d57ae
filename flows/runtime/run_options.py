"""Options of a run on top of a preset, the same for commands, deployments and schedules."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Field

from kvpolicy.benchmarks.sources import absolute_entry
from kvpolicy.config.settings import Settings, bare_type, field_types, is_settings, meanings
from kvpolicy.presets.pipeline_config import PipelineConfig, load_preset, read_setting

RunnerName = Literal["local", "processes", "ray", "dask"]
CHOSEN = (
    "prompts.tasks",
    "evaluate.methods",
    "evaluate.budgets",
    "train.agent",
    "train.objective",
    "collect.compression",
    "collect.stored_dtype",
    "prompts.data",
    "prompts.language",
)
"""Fields of the configuration that have an option and a parameter of their own; all others are `settings`."""


def _chosen_fields() -> Iterator[tuple[str, Any, Any]]:
    for path in CHOSEN:
        section, name = path.split(".")
        of_section = field_types(PipelineConfig)[section]
        kind = bare_type(field_types(of_section)[name])
        if get_origin(kind) is tuple:
            kind = list[bare_type(get_args(kind)[0])]
        elif is_settings(kind) or get_origin(kind) is Literal:  # by name; the configuration checks it
            kind = str
        yield name, Annotated[kind | None, Field(description=meanings(of_section)[name])], None


@dataclass(frozen=True, kw_only=True)
class Choices(dataclasses.make_dataclass("ChosenFields", _chosen_fields(), frozen=True, kw_only=True)):
    """Choices on top of a preset; None keeps the preset's."""

    settings: Annotated[
        list[str] | None,
        Field(description="Any other fields, as `section.field=value` entries such as `evaluate.num_samples=4`."),
    ] = None

    def configure(self, preset: str) -> PipelineConfig:
        """The preset with the choices made.

        Raises:
            InputError: If the preset is unknown or a choice is wrong; all that is wrong is named at once.
        """
        config = load_preset(preset)
        mended = {
            "budgets": self.budgets and sorted(self.budgets),
            "data": self.data and [absolute_entry(entry) for entry in self.data],
        }
        values = vars(self) | mended
        chosen = [(*path.split("."), values[path.partition(".")[2]]) for path in CHOSEN]
        changes = [{section: {name: value}} for section, name, value in chosen if value is not None]
        return config.with_changes(*changes, *map(read_setting, self.settings or []))


@dataclass(frozen=True, kw_only=True)
class Runner(Settings):
    """Where the parts of stages run (fragments, head groups, shards). No result and no request depends on it."""

    place = "runner"
    __pydantic_config__ = {"use_attribute_docstrings": True}  # noqa: RUF012  # for the form

    name: RunnerName = "local"
    """Where parts run: `local`, one by one in the flow's process, `processes` of this machine, `ray` or `dask`."""
    address: str | None = None
    """Address of a Ray or Dask cluster, by default that of RAY_ADDRESS or DASK_SCHEDULER_ADDRESS; without one they
    start on this machine for the run.
    """
    num_workers: int | None = None
    """Parts that run at once on this machine; by default as many as leave no core idle, at least two."""

    def conflicts(self) -> Iterator[str]:
        """Say what a runner of that name cannot have."""
        if self.address is not None and self.name not in ("ray", "dask"):
            yield f"address: runner {self.name} has no address, got {self.address!r}: leave it out, or use ray or dask"
        if self.num_workers is not None and (self.num_workers < 1 or self.name == "local" or self.address):
            yield (
                f"num_workers: runner {self.name} has {self.num_workers} workers, expected 1 or more, and only where "
                "they start on this machine: processes, or ray or dask without an address"
            )
