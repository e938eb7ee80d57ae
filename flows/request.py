"""What a pipeline was asked for, as an artifact: every run notes it, so that it can be asked for again."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.runtime.run_options import Choices
from kvpolicy.errors import InputError
from kvpolicy.models.reference import EMBEDDED
from kvpolicy.presets.pipeline_config import PipelineConfig, read_config
from storage.errors import StorageError
from storage.lineage.artifacts import Artifact, request_artifact


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request, with everything that it meant at the time.

    Attributes:
        config: The whole configuration: the preset of that time with the choices made.
        model: The model as it was named; a path is absolute.
        seed: The seed.
        choices: What was chosen on top of the preset; paths are absolute.
    """

    config: PipelineConfig
    model: str
    seed: int
    choices: Choices

    @classmethod
    def make(cls, *, preset: str, model: str, seed: int, choices: Choices) -> "Request":
        """Put a request together; paths are made absolute, so that it means the same in any working folder.

        Raises:
            InputError: If the preset is unknown or a choice is wrong.
        """
        config = choices.configure(preset)
        absolute = dataclasses.replace(choices, data=list(config.prompts.data) if choices.data else None)
        return cls(config=config, model=_absolute_if_path(model), seed=seed, choices=absolute)

    def to_artifact(self) -> Artifact:
        """The request as the catalog has it."""
        config = self.config
        name = f"preset {config.preset}, version {config.version}, of {self.model}, seed {self.seed}"
        return request_artifact(dataclasses.asdict(self), name)

    @classmethod
    def from_artifact(cls, artifact: Artifact) -> "Request":
        """The request that the catalog has.

        Raises:
            InputError: If the configuration has what this release does not know.
            StorageError: If the choices do.
        """
        content: Mapping[str, Any] = artifact.metadata
        values = dict(content["config"])
        preset = str(values.pop("preset"))
        try:
            config = read_config(values, name=preset)
        except InputError as error:
            raise InputError(f"{artifact.artifact_id}: {error}: use the release that recorded it") from error
        known = {field.name for field in dataclasses.fields(Choices)}
        if unknown := set(content["choices"]) - known:
            raise StorageError(
                f"{artifact.artifact_id} has the choices {', '.join(sorted(unknown))}, which this release does not "
                "know: use the release that recorded it"
            )
        return cls(
            config=config,
            model=str(content["model"]),
            seed=int(content["seed"]),
            choices=Choices(**content["choices"]),
        )


def _absolute_if_path(model: str) -> str:
    path = Path(model).expanduser()
    return str(path.absolute()) if model != EMBEDDED and path.exists() else model
