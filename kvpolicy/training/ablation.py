"""Which training objectives `kvp ablate` compares; the comparison itself is `kvpolicy.results.objectives`."""

from dataclasses import dataclass
from typing import Annotated

from kvpolicy.config.settings import Positive, Settings, Several
from kvpolicy.objectives.registry import OBJECTIVES


@dataclass(frozen=True, kw_only=True)
class AblateConfig(Settings):
    """Which training objectives `kvp ablate` compares."""

    objectives: Several[Annotated[str, OBJECTIVES.__getitem__]] = OBJECTIVES.own_names
    """Objectives to compare; `reference` always takes part."""
    reference: Annotated[str, OBJECTIVES.__getitem__] = "exact"
    """Objective that the others are compared with."""
    num_seeds: Positive = 3
    """Trainings of each objective, with a seed each."""

    @property
    def compared(self) -> tuple[str, ...]:
        """All objectives that take part, the reference first."""
        return tuple(dict.fromkeys([self.reference, *self.objectives]))
