"""Settings: configurations whose fields are declared once, with type, bounds, default and meaning.

    @dataclass(frozen=True, kw_only=True)
    class Pace(Settings):
        num_steps: Positive = 100
        \"\"\"Steps to take.\"\"\"

The annotation says which values are right, the text below a field what it means. Checks, the reader of presets,
options of commands, forms and the page of reference follow from these. Not for what a value is used for.
"""

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from kvpolicy.errors import InputError

S = TypeVar("S", bound="Settings")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Expect:
    """A bound in an annotation; a function that raises an InputError is one too.

    Attributes:
        holds: Whether a value of the type is right.
        wording: What errors expect.
    """

    holds: Callable[[Any], bool]
    wording: str


def at_least(least: int | float) -> Expect:
    """The bound of a number from below."""
    return Expect(lambda value: value >= least, f"at least {least}")


def one_of(names: Collection[str]) -> Expect:
    """The bound of a name to those that there are."""
    return Expect(lambda value: value in names, f"one of {', '.join(names)}")


Positive = Annotated[int, at_least(1)]
Count = Annotated[int, at_least(0)]
NotNegative = Annotated[float, at_least(0)]
MoreThanZero = Annotated[float, Expect(lambda value: value > 0, "more than 0")]
Share = Annotated[float, Expect(lambda value: 0 <= value <= 1, "a number from 0 to 1")]
InnerShare = Annotated[float, Expect(lambda value: 0 < value < 1, "between 0 and 1")]
Several = Annotated[
    tuple[T, ...],
    Expect(bool, "at least one"),
    Expect(lambda values: len(set(values)) == len(values), "no value twice"),
]
# What plain values of a type are: a bool is no number, and an integer is within JSON's and TOML's 64 bits.
_PLAIN = {
    int: Expect(lambda value: type(value) is int and abs(value) < 2**63, "a whole number of at most 64 bits"),
    float: Expect(lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max, "a finite number"),
    str: Expect(lambda value: type(value) is str, "text"),
    bool: Expect(lambda value: type(value) is bool, "true or false"),
}


class SettingsError(InputError):
    """All that is wrong with settings, in one line.

    Attributes:
        problems: One by one; each begins with the name of a field.
    """

    def __init__(self, message: str, problems: Collection[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)


class Settings:
    """Base of frozen dataclasses whose fields are checked when they are made.

    Attributes:
        place: Where the fields are, for errors; by default the name of the class.
        by_name: Settings of this kind that have a name.
    """

    place: ClassVar[str] = ""
    by_name: ClassVar[Mapping[str, Any]] = {}

    def __post_init__(self) -> None:
        """Check every field, and that they go together.

        Raises:
            SettingsError: Naming each wrong field, its value and what was expected.
        """
        values = {name: getattr(self, name) for name in field_types(type(self))}
        problems = _field_problems(type(self), values)
        if not _field_problems(type(self), values, bounds=False):
            with suppress(InputError):  # of an unknown name, which is among the problems already
                problems.extend(self.conflicts())
        if problems:
            raise SettingsError(f"{self.place or type(self).__name__}: " + "; ".join(problems), problems)

    def conflicts(self) -> Iterator[str]:
        """Say which fields do not go together, each line beginning with the name of one."""
        yield from ()


def field_types(kind: type) -> dict[str, Any]:
    """Name -> annotation of each field, bounds included."""
    hints: dict[str, Any] = {}
    with suppress(NameError):  # a package may import types of fields for type checkers alone: these go unchecked
        hints = get_type_hints(kind, include_extras=True)
    return {entry.name: hints.get(entry.name, entry.type) for entry in dataclasses.fields(kind)}


def bare_type(kind: Any) -> Any:
    """An annotation without its bounds, and without None."""
    if get_origin(kind) is Annotated or NoneType in get_args(kind):
        return bare_type(get_args(kind)[0])
    return kind


def is_settings(kind: Any) -> bool:
    """Whether an annotation is that of settings within settings."""
    return isinstance(kind, type) and issubclass(kind, Settings)


def meanings(kind: type) -> dict[str, str]:
    """Name -> meaning of each field: the text below its declaration."""
    (declaration,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    return {
        ast.unparse(entry.target): " ".join(ast.literal_eval(text.value).split())
        for entry, text in pairwise(getattr(declaration, "body", ()))
        if isinstance(entry, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def read_settings(kind: type[S], document: Any, title: str = "", *, place: str = "", **given: Any) -> S:
    """Make settings of plain values: what TOML holds, or what `dataclasses.asdict` gave.

    Args:
        kind: The settings to make.
        document: A table of values by field; a name, where such settings have names.
        title: What the document is, for errors; settings within settings need none.
        place: Where such are within the document.
        **given: Fields that the document must not have.

    Raises:
        SettingsError: Naming all that is wrong, each with its place.
    """
    if isinstance(document, str) and document in kind.by_name:
        return cast(S, kind.by_name[document])
    if not isinstance(document, Mapping):
        names = f" or one of {', '.join(kind.by_name)}" if kind.by_name else ""
        raise SettingsError(f"{place} is {document!r}, expected a table{names}")
    inside = f"{place}." if place else ""
    known = {name: one for name, one in field_types(kind).items() if name not in given}
    remedy = "" if place else f", expected {', '.join(known) or 'none'}"
    problems = [f"{inside}{name} is unknown{remedy}" for name in document if name not in known]
    broken = [f"{inside}{name} is missing" for name in _required(kind) if name not in {*document, *given}]
    values = given | {name: _from_plain(value, known[name]) for name, value in document.items() if name in known}
    for name in filter(lambda name: is_settings(known.get(name)), document):
        try:
            values[name] = read_settings(known[name], values.pop(name), place=inside + name)
        except SettingsError as error:
            broken += error.problems
    of_fields: Collection[str] = ()
    if broken or _field_problems(kind, values, bounds=False):
        of_fields = _field_problems(kind, values)
    else:
        try:
            made = kind(**values)
        except SettingsError as error:
            of_fields = error.problems
    problems += broken + [inside + problem for problem in of_fields]
    if problems:
        raise SettingsError(f"{title}: " + "; ".join(problems), problems)
    return made


def _required(kind: Any) -> list[str]:
    missing = dataclasses.MISSING
    return [one.name for one in dataclasses.fields(kind) if one.default is missing and one.default_factory is missing]


def _from_plain(value: Any, kind: Any) -> Any:
    if bare_type(kind) is float and type(value) is int and not list(_faults(value, float)):
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def _field_problems(kind: type, values: Mapping[str, Any], *, bounds: bool = True) -> list[str]:
    types = field_types(kind)
    return [
        f"{name}{fault}" for name in types if name in values for fault in _faults(values[name], types[name], bounds)
    ]


def _faults(value: Any, kind: Any, bounds: bool = True) -> Iterator[str]:
    """What is wrong with a value, as an annotation says it; types that plain values do not have are not asked about."""
    kinds = get_args(kind)
    if get_origin(kind) is Annotated:
        yield from _faults(value, kinds[0], bounds)
        if bounds and not list(_faults(value, kinds[0], bounds=False)):
            yield from _beyond(value, kinds[1:])
    elif NoneType in kinds:
        yield from () if value is None else _faults(value, kinds[0], bounds)
    elif get_origin(kind) is Literal:
        yield from _beyond(value, [one_of(kinds)])
    elif get_origin(kind) is tuple:
        for item in value if isinstance(value, tuple) else ():
            yield from _faults(item, kinds[0], bounds)
        yield from _beyond(value, [Expect(lambda value: isinstance(value, tuple), "a list")])
    elif kind in _PLAIN:
        yield from _beyond(value, [_PLAIN[kind]])


def _beyond(value: Any, bounds: Collection[Any]) -> Iterator[str]:
    for bound in bounds:
        try:
            if not isinstance(bound, Expect):
                bound(value)
            elif not bound.holds(value):
                yield f" is {value!r}, expected {bound.wording}"
        except InputError as error:
            yield f": {error}"
