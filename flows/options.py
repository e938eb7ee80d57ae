"""What a person or a schedule may choose on top of a preset."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvpolicy.errors import InputError
from kvpolicy.pipeline import PipelineConfig, load_preset

Preset = Literal["smoke", "demo", "paper"]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Choices on top of a preset; None keeps the preset's.

    Attributes:
        tasks: Tasks of the benchmark.
        methods: Methods that take part.
        budgets: Entries kept per KV head, in tokens.
        estimator: `exact` or `rloo`.
        compression: Of the stored traces: `none`, `zstd` or `shuffled_zstd`.
        stored_dtype: Of stored keys and values: `model` or `float8_e4m3fn`.
        essays: Text files for the tasks that need prose.
        squad: SQuAD v2.0 file, for `qa_1`.
        hotpotqa: HotpotQA dev distractor file, for `qa_2`.
    """

    tasks: list[str] | None = None
    methods: list[str] | None = None
    budgets: list[int] | None = None
    estimator: str | None = None
    compression: str | None = None
    stored_dtype: str | None = None
    essays: list[str] | None = None
    squad: str | None = None
    hotpotqa: str | None = None

    def configure(self, preset: str) -> PipelineConfig:
        """The preset with the choices made.

        Raises:
            InputError: If the preset is unknown or a choice is wrong.
        """
        changes: dict[str, dict[str, Any]] = {
            "prompts": {
                "tasks": _tuple(self.tasks),
                "essays": _tuple(self.essays and [_absolute(path) for path in self.essays]),
                "squad": self.squad and _absolute(self.squad),
                "hotpotqa": self.hotpotqa and _absolute(self.hotpotqa),
            },
            "collect": {"compression": self.compression, "stored_dtype": self.stored_dtype},
            "evaluate": {
                "methods": _tuple(self.methods),
                "budgets": _tuple(self.budgets and sorted(self.budgets)),
            },
            "train": {"estimator": self.estimator},
        }
        given = {
            section: {key: value for key, value in part.items() if value is not None}
            for section, part in changes.items()
        }
        for path in [*(self.essays or []), *filter(None, (self.squad, self.hotpotqa))]:
            if not Path(path).expanduser().is_file():
                raise InputError(f"text {path} does not exist: check --essays, --squad and --hotpotqa")
        return load_preset(preset).with_changes(given)


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
