"""The configuration of a whole pipeline, and the named presets, which are data (`kvpolicy/presets/*.toml`).

An unknown key is an error, and all problems of a file are reported at once.
"""

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kvpolicy.ablation import AblateConfig
from kvpolicy.benchmarks.prompt_set import PromptConfig
from kvpolicy.collection import CollectConfig
from kvpolicy.errors import InputError
from kvpolicy.evaluation import EvaluateConfig
from kvpolicy.models.language_model import DTYPES
from kvpolicy.policies.agent import AgentConfig
from kvpolicy.policies.soft_token_training import SoftTokenConfig
from kvpolicy.promotion import PromoteConfig
from kvpolicy.training import TrainConfig


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Everything that a pipeline run is told, besides the model and the seed.

    Attributes:
        preset: Name of the preset that it began as.
        version: Version of that preset.
        dtype: In which the model runs.
        prompts: What samples are about.
        collect: What is collected.
        train: How policies are trained.
        soft_tokens: How the soft tokens of `judgeq` are trained, where it is judged.
        evaluate: What is judged.
        promote: When a new policy set becomes the champion.
        ablate: Which training objectives `kvp ablate` compares.
    """

    preset: str
    version: str
    dtype: str = "bfloat16"
    prompts: PromptConfig = field(default_factory=PromptConfig)
    collect: CollectConfig = field(default_factory=CollectConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    soft_tokens: SoftTokenConfig = field(default_factory=SoftTokenConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    promote: PromoteConfig = field(default_factory=PromoteConfig)
    ablate: AblateConfig = field(default_factory=AblateConfig)

    def __post_init__(self) -> None:
        """Check the fields that are not checked by the parts.

        Raises:
            InputError: Naming the field, what was got and what was expected.
        """
        if self.dtype not in DTYPES:
            raise InputError(_unknown_dtype(self.dtype))
        self.prompts_of("test")

    def prompts_of(self, split: str) -> tuple[PromptConfig, int]:
        """What the prompts of a split are about, and how many there are of each task.

        Raises:
            InputError: If a task that is judged on is unknown or lacks its data.
        """
        if split == "train":
            return self.prompts, self.collect.num_train_samples
        if split == "validation":
            return self.prompts, self.collect.num_heldout_samples
        judged = self.evaluate
        evaluated = dataclasses.replace(
            self.prompts,
            tasks=self.prompts.tasks if judged.tasks is None else judged.tasks,
            length_tokens=self.prompts.length_tokens if judged.length_tokens is None else judged.length_tokens,
        )
        return evaluated, judged.num_samples

    def with_changes(self, changes: Mapping[str, Mapping[str, Any]]) -> "PipelineConfig":
        """The same configuration with some fields of some sections changed.

        Args:
            changes: Section to field to value, such as `{"evaluate": {"budgets": (64, 128)}}`.

        Raises:
            InputError: If a section, a field or a value is wrong.
        """
        parts = {}
        for section, values in changes.items():
            if section not in _SECTIONS:
                raise InputError(
                    f"configuration: section {section!r} is unknown, expected one of {', '.join(_SECTIONS)}"
                )
            part = getattr(self, section)
            unknown = set(values) - {entry.name for entry in dataclasses.fields(part)}
            if unknown:
                raise InputError(f"configuration: {section} has no {', '.join(sorted(unknown))}")
            parts[section] = dataclasses.replace(part, **values)
        return dataclasses.replace(self, **parts)

    def with_settings(self, settings: Sequence[str]) -> "PipelineConfig":
        """The same configuration with single fields set.

        Args:
            settings: `section.field=value` entries, such as `evaluate.num_samples=4` or `train.agent.width=32`; the
                value as TOML has it, text also without quotes.

        Raises:
            InputError: If an entry is not of this form, or a section, a field or a value is wrong.
        """
        document = dataclasses.asdict(self)
        preset = document.pop("preset")
        for entry in settings:
            _merge(document, _read_setting(entry))
        return read_config(document, name=preset)


# Section -> its configuration.
_SECTIONS: dict[str, Any] = {
    entry.name: entry.default_factory
    for entry in dataclasses.fields(PipelineConfig)
    if entry.default_factory is not dataclasses.MISSING
}


def _read_setting(entry: str) -> dict[str, Any]:
    """The tables that lead to a field, with its value."""
    key, equals, value = entry.partition("=")
    if equals and ("." in key or key.strip() == "dtype"):
        for text in (value, json.dumps(value.strip(), ensure_ascii=False)):
            with suppress(tomllib.TOMLDecodeError):
                return tomllib.loads(f"{key} = {text}")
    raise InputError(f"setting {entry!r} is not of the form section.field=value, such as evaluate.num_samples=4")


def _merge(document: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(document.get(key), dict):
            _merge(document[key], value)
        else:
            document[key] = value


def preset_names() -> tuple[str, ...]:
    """Names of the presets, from the smallest to the largest."""
    return ("smoke", "demo", "study", "paper")


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
    problems: list[str] = []
    top = {key: value for key, value in document.items() if key not in _SECTIONS}
    problems += [f"{key} is unknown" for key in top if key not in ("version", "dtype")]
    if "version" not in top:
        problems.append("version is missing")
    problems += [f"{key} is {value!r}, expected text" for key, value in top.items() if not isinstance(value, str)]
    if isinstance(dtype := top.get("dtype"), str) and dtype not in DTYPES:
        problems.append(_unknown_dtype(dtype))
    parts = {
        section: _read_part(section, part_type, document.get(section, {}), problems)
        for section, part_type in _SECTIONS.items()
    }
    if problems:
        raise InputError(f"configuration {name}: " + "; ".join(problems))
    return PipelineConfig(preset=name, **top, **parts)


def _read_part(place: str, part_type: type, values: Any, problems: list[str]) -> Any:
    """Make a part of the configuration; what is wrong with it is added to `problems`, each with its place."""
    if not isinstance(values, Mapping):
        problems.append(f"{place} is {values!r}, expected a table")
        return None
    kinds = get_type_hints(part_type)
    fields: dict[str, Any] = {}
    for key, value in values.items():
        path_of_field, kind = f"{place}.{key}", kinds.get(key)
        given: Any = tuple(value) if isinstance(value, list) else value
        if kind is None:
            problems.append(f"{path_of_field} is unknown")
        elif kind is AgentConfig and isinstance(value, str):
            fields |= _named_agent(path_of_field, value, problems)
        elif dataclasses.is_dataclass(kind):
            part = _read_part(path_of_field, kind, value, problems)  # type: ignore[arg-type]  # a class, as it is a type hint
            fields |= {} if part is None else {key: part}
        elif _fits(given, kind):
            fields[key] = float(given) if kind is float else given
        else:
            problems.append(f"{path_of_field} is {value!r}, expected {_wording(kind)}")
    try:
        return part_type(**fields)
    except InputError as error:
        problems.append(f"{place}: " + str(error).removeprefix(f"{place.rpartition('.')[2]}: "))
        return None


def _named_agent(place: str, name: str, problems: list[str]) -> dict[str, AgentConfig]:
    try:
        return {"agent": AgentConfig.named(name)}
    except InputError as error:
        problems.append(f"{place}: {error}")
        return {}


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value from TOML is of a field's type."""
    kinds = get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(item, kinds[0]) for item in value)
    if get_origin(kind) is Literal:
        return value in kinds
    if kinds:  # a union
        return any(_fits(value, one) for one in kinds)
    if type(value) not in ((int, float) if kind is float else (kind,)):  # a bool is no number here
        return False
    return math.isfinite(value) if type(value) is float else type(value) is not int or abs(value) < 2**63


def _wording(kind: Any) -> str:
    kinds = get_args(kind)
    if get_origin(kind) is tuple:
        return f"a list, each {_wording(kinds[0])}"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(kinds)}"
    if kinds:
        return " or ".join(_wording(one) for one in kinds if one is not NoneType)
    return {int: "a whole number of at most 64 bits", float: "a finite number", str: "text"}.get(kind, str(kind))


def _unknown_dtype(dtype: str) -> str:
    return f"dtype {dtype!r} is unknown, expected one of {', '.join(DTYPES)}"
