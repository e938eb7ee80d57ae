"""Settings are declared once: what checks, reads and describes them follows from annotation, default and text."""

import dataclasses
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.config.settings import (
    Count,
    MoreThanZero,
    Positive,
    Settings,
    SettingsError,
    Several,
    Share,
    field_types,
    is_settings,
    meanings,
    read_settings,
)
from kvpolicy.errors import InputError
from kvpolicy.presets.pipeline_config import PipelineConfig


def _refuse_thirteen(number: int) -> None:
    if number == 13:
        raise InputError("thirteen brings bad luck")


@dataclass(frozen=True, kw_only=True)
class Inner(Settings):
    """Settings within settings."""

    width: Positive = 4
    """Width of it."""


@dataclass(frozen=True, kw_only=True)
class Outer(Settings):
    """Settings of every kind."""

    place = "outermost"

    title: str
    """Title of it."""
    inner: Inner = field(default_factory=Inner)
    numbers: Several[Annotated[int, _refuse_thirteen]] = (1, 2)
    """Numbers of it, which
    take two lines.
    """
    most: Positive | None = None
    """Most of it."""
    few: Count = 0
    """Few of it."""
    rate: MoreThanZero = 1.0
    """Rate of it."""
    share: Share = 0.5
    """Share of it."""
    colour: Literal["red", "blue"] = "red"
    """Colour of it."""
    wide: bool = False
    """Whether it is wide."""

    def conflicts(self) -> Iterator[str]:
        """Say that few are more than most."""
        if self.most is not None and self.few > self.most:
            yield f"few is {self.few}, expected at most {self.most}"


Inner.by_name = {"narrow": Inner(width=1)}


def problems_of(**document) -> set[str]:
    with pytest.raises(SettingsError) as caught:
        read_settings(Outer, document, "a file")
    assert str(caught.value) == "a file: " + "; ".join(caught.value.problems)
    return set(caught.value.problems)


def test_all_that_is_wrong_is_named_at_once():
    wrong = {
        "inner": {"width": 0, "depth": 1},
        "numbers": [13, "one", 2],
        "most": 0,
        "few": -1,
        "rate": float("nan"),
        "share": 2,
        "colour": "green",
        "wide": 1,
        "height": 3,
    }
    assert problems_of(**wrong) == {
        "height is unknown, expected title, inner, numbers, most, few, rate, share, colour, wide",
        "inner.depth is unknown",
        "inner.width is 0, expected at least 1",
        "title is missing",
        "numbers is 'one', expected a whole number of at most 64 bits",
        "numbers: thirteen brings bad luck",
        "most is 0, expected at least 1",
        "few is -1, expected at least 0",
        "rate is nan, expected a finite number",
        "share is 2.0, expected a number from 0 to 1",
        "colour is 'green', expected one of red, blue",
        "wide is 1, expected true or false",
    }


def test_fields_that_do_not_go_together_are_named_with_bounds_that_are_not_kept():
    assert problems_of(title="", few=3, most=2, share=1.5) == {
        "few is 3, expected at most 2",
        "share is 1.5, expected a number from 0 to 1",
    }
    assert problems_of(title="", numbers=[13, 13]) == {
        "numbers: thirteen brings bad luck",
        "numbers is (13, 13), expected no value twice",
    }


@pytest.mark.usefixtures("unchecked")
def test_the_same_is_said_of_settings_that_are_made_in_code():
    with pytest.raises(SettingsError) as caught:
        Outer(title=3, few=True, numbers=())
    assert str(caught.value) == (
        "outermost: title is 3, expected text; numbers is (), expected at least one; "
        "few is True, expected a whole number of at most 64 bits"
    )
    with pytest.raises(SettingsError, match=r"^Inner: width is 0, expected at least 1$"):
        Inner(width=0)
    again = pickle.loads(pickle.dumps(caught.value))  # from a worker
    assert (str(again), again.problems) == (str(caught.value), caught.value.problems)


def test_settings_within_settings_have_a_name_or_fields():
    assert read_settings(Outer, {"title": "", "inner": "narrow"}).inner == Inner(width=1)
    assert read_settings(Outer, {"title": "", "inner": {"width": 1}}).inner == Inner(width=1)
    assert problems_of(title="", inner="wide") == {"inner is 'wide', expected a table or one of narrow"}
    assert problems_of(title="", inner=3) == {"inner is 3, expected a table or one of narrow"}


def test_types_that_only_type_checkers_know_check_nothing():
    @dataclass(frozen=True, kw_only=True)
    class Foreign(Settings):
        width: "Unimportable" = 4  # noqa: F821

    assert Foreign(width="any").width == "any"
    assert field_types(Foreign) == {"width": "Unimportable"}


def test_what_a_document_must_not_have_is_unknown_in_it():
    assert read_settings(Outer, {"title": ""}, few=2).few == 2
    with pytest.raises(SettingsError, match="few is unknown"):
        read_settings(Outer, {"title": "", "few": 1}, few=2)


@given(
    st.fixed_dictionaries(
        {
            "title": st.text(),
            "inner": st.fixed_dictionaries({"width": st.integers(1, 2**63 - 1)}),
            "numbers": st.lists(st.integers(14, 99), min_size=1, unique=True),
            "most": st.none() | st.integers(9, 99),
            "few": st.integers(0, 9),
            "rate": st.floats(1e-9, 1e9) | st.integers(1, 9),
            "share": st.floats(0, 1),
            "colour": st.sampled_from(["red", "blue"]),
            "wide": st.booleans(),
        }
    )
)
def test_settings_have_the_values_that_they_are_read_of(document):
    made = read_settings(Outer, document)
    assert dataclasses.asdict(made) == document | {"numbers": tuple(document["numbers"])}
    assert type(made.rate) is float
    assert read_settings(Outer, dataclasses.asdict(made)) == made


def test_the_text_below_a_field_is_its_meaning():
    assert meanings(Outer)["numbers"] == "Numbers of it, which take two lines."
    assert list(meanings(Outer)) == [name for name in field_types(Outer) if name != "inner"]


def test_every_field_of_the_configuration_has_a_meaning():
    def lacking(kind: type) -> list[str]:
        parts = {name: one for name, one in field_types(kind).items() if is_settings(one)}
        missing = field_types(kind).keys() - parts.keys() - meanings(kind).keys()
        return [*missing, *(name for part in parts.values() for name in lacking(part))]

    assert lacking(PipelineConfig) == []
    assert all(part.__doc__ for part in field_types(PipelineConfig).values() if is_settings(part))
