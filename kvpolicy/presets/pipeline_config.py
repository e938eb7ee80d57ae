"""The configuration of a whole pipeline, and the named presets, which are data (`kvpolicy/presets/*.toml`).

An unknown key is an error, and all problems of a file are reported at once.
"""

import dataclasses
import json
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from typing import Annotated, Any, Literal, get_args

from kvpolicy.benchmarks.prompt_set import PromptConfig
from kvpolicy.config.settings import Settings, SettingsError, one_of, read_settings
from kvpolicy.errors import InputError
from kvpolicy.evaluation import EvaluateConfig
from kvpolicy.models.language_model import DTYPES
from kvpolicy.names import HELDOUT_SPLIT, TEST_SPLIT, TRAINING_SPLIT
from kvpolicy.results.promotion import PromoteConfig
from kvpolicy.training.ablation import AblateConfig
from kvpolicy.training.collection import CollectConfig
from kvpolicy.training.policy_training import TrainConfig
from kvpolicy.training.soft_token_training import SoftTokenConfig

Preset = Literal["smoke", "demo", "study", "paper"]


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Settings):
    """The whole configuration of a run, besides the model and the seed."""

    preset: str
    """Name of the preset."""
    version: str
    """Version of the preset."""
    dtype: Annotated[str, one_of(DTYPES)] = "bfloat16"
    """Number type in which the model runs."""
    prompts: PromptConfig = field(default_factory=PromptConfig)
    collect: CollectConfig = field(default_factory=CollectConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    soft_tokens: SoftTokenConfig = field(default_factory=SoftTokenConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    promote: PromoteConfig = field(default_factory=PromoteConfig)
    ablate: AblateConfig = field(default_factory=AblateConfig)

    def prompts_of(self, split: str) -> tuple[PromptConfig, int]:
        """What the prompts of a split are about, and how many there are of each task.

        Raises:
            InputError: If a task to evaluate on is unknown or lacks its data.
        """
        if split == TRAINING_SPLIT:
            return self.prompts, self.collect.num_train_samples
        if split == HELDOUT_SPLIT:
            return self.prompts, self.collect.num_heldout_samples
        changes = {name: getattr(self.evaluate, name) for name in ("tasks", "length_tokens")}
        changes = {name: value for name, value in changes.items() if value is not None}
        return dataclasses.replace(self.prompts, **changes), self.evaluate.num_samples

    def conflicts(self) -> Iterator[str]:
        """Say which tasks to evaluate on are unknown or lack their data."""
        try:
            self.prompts_of(TEST_SPLIT)
        except SettingsError as error:
            yield from (f"evaluate.{problem}" for problem in error.problems)

    def with_changes(self, *changes: Mapping[str, Any]) -> "PipelineConfig":
        """The same configuration with some fields of some sections changed.

        Args:
            *changes: Section to field to plain value, such as `{"evaluate": {"budgets": [64, 128]}}`; later ones win.

        Raises:
            InputError: If a section, a field or a value is wrong.
        """
        document = dataclasses.asdict(self)
        preset = document.pop("preset")
        for one in changes:
            _merge(document, one)
        return read_config(document, name=preset)


def read_setting(entry: str) -> dict[str, Any]:
    """The tables that lead to a field, with its value.

    Args:
        entry: `section.field=value`, such as `evaluate.num_samples=4` or `train.agent.width=32`; the value as TOML has
            it, text also without quotes.

    Raises:
        InputError: If it is not of this form.
    """
    key, equals, value = entry.partition("=")
    if equals and ("." in key or key.strip() == "dtype"):
        for text in (value, json.dumps(value.strip(), ensure_ascii=False)):
            with suppress(tomllib.TOMLDecodeError):
                return tomllib.loads(f"{key} = {text}")
    raise InputError(f"setting {entry!r} is not of the form section.field=value, such as evaluate.num_samples=4")


def _merge(document: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(document.get(key), dict):
            _merge(document[key], value)
        else:
            document[key] = value


def preset_names() -> tuple[str, ...]:
    """Names of the presets, from the smallest to the largest."""
    return get_args(Preset)


def load_preset(name: str) -> PipelineConfig:
    """Load a named preset.

    Raises:
        InputError: If there is none of that name, or its file is wrong; all problems are named at once.
    """
    if name not in preset_names():
        raise InputError(f"preset {name!r} is unknown, expected one of {', '.join(preset_names())}")
    text = resources.files("kvpolicy").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")
    return parse_config(text, name=name)


def parse_config(text: str, *, name: str) -> PipelineConfig:
    """Read a configuration from TOML.

    Raises:
        InputError: If it is no TOML or has problems, each with its place, all in one line.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"configuration {name}: not TOML: {error}") from error
    return read_config(document, name=name)


def read_config(document: Mapping[str, Any], *, name: str) -> PipelineConfig:
    """Read a configuration from plain values: what TOML holds, or what `dataclasses.asdict` gave, without its preset.

    Args:
        document: The values.
        name: Of the preset that they are of.

    Raises:
        InputError: If there are problems, each with its place, all in one line.
    """
    return read_settings(PipelineConfig, document, f"configuration {name}", preset=name)
