"""What a request can choose by name: our own, and what packages that someone else installed offer.

A package offers a method, say, by an entry point: a name in the group `kvpolicy.methods` that leads to a class. Nothing
of it is imported before it is asked for by that name. Not for the choices themselves: each kind has a `registry.py`
beside its own files.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from kvpolicy.errors import InputError, first_line

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Something that a request chose, as far as its result depends on it.

    Attributes:
        module: Module whose code it is.
        package: Package that offers it; empty for our own.
        version: Version of that package.
    """

    module: str
    package: str = ""
    version: str = ""


class Registry(Generic[T]):
    """All choices of one kind by name, our own first."""

    def __init__(self, kind: str, own: Mapping[str, T], *, check: Callable[[str, Any], str]) -> None:
        """Register our own; packages are looked for when names are first asked for.

        Args:
            kind: A noun, such as `method`; the group of entry points is its plural.
            own: Our own, by name.
            check: Says in a few words what is wrong with a choice of that name that a package offers; nothing if it
                can be used.
        """
        self._kind, self._own, self._check = kind, own, check
        self._loaded: dict[str, T] = {}

    @property
    def own_names(self) -> tuple[str, ...]:
        """Names of our own."""
        return tuple(self._own)

    @property
    def names(self) -> tuple[str, ...]:
        """All names.

        Raises:
            InputError: If a package offers a name that is taken.
        """
        return (*self._own, *self._offered())

    def __getitem__(self, name: str) -> T:
        """The choice of that name.

        Raises:
            InputError: If there is none, or the one that a package offers cannot be used.
        """
        if name in self._own:
            return self._own[name]
        if name not in self._loaded:
            self._loaded[name] = self._load(name, self._entry(name))
        return self._loaded[name]

    def choices(self, names: Iterable[str]) -> tuple[Choice, ...]:
        """What the results of a request that chose these names depend on, each once.

        Raises:
            InputError: As for `[]`.
        """
        return tuple(dict.fromkeys(self._choice(name) for name in names))

    def _choice(self, name: str) -> Choice:
        module: str = self[name].__module__
        if name in self._own:
            return Choice(module=module)
        distribution = self._entry(name).dist
        return Choice(
            module=module,
            package=distribution.name if distribution else "",
            version=distribution.version if distribution else "",
        )

    def _entry(self, name: str) -> EntryPoint:
        if name not in self.names:
            raise InputError(f"{self._kind} {name!r} is unknown, expected one of {', '.join(self.names)}")
        return self._offered()[name]

    def _load(self, name: str, entry: EntryPoint) -> T:
        try:
            made: T = entry.load()
        except Exception as error:  # whatever importing somebody's package may raise
            reason = f"{type(error).__name__}: {first_line(error)}"
        else:
            reason = self._check(name, made)
        if reason:
            raise InputError(
                f"{self._kind} {name!r} of package {_package(entry)} cannot be used: {reason}; mend or uninstall it"
            )
        return made

    def _offered(self) -> Mapping[str, EntryPoint]:
        offered: dict[str, EntryPoint] = {}
        for entry in installed_extensions(self._kind):
            other = offered.get(entry.name)
            if entry.name in self._own or (other is not None and other.value != entry.value):
                owner = "kvpolicy itself" if other is None else f"package {_package(other)}"
                raise InputError(
                    f"package {_package(entry)} offers a {self._kind} {entry.name!r}, a name that {owner} has: "
                    "rename it, or uninstall one of them"
                )
            offered[entry.name] = entry
        return offered


@functools.cache
def installed_extensions(kind: str) -> tuple[EntryPoint, ...]:
    """Entry points of one kind that installed packages have, in the order of their names."""
    return tuple(sorted(entry_points(group=f"kvpolicy.{kind}s"), key=lambda entry: (entry.name, entry.value)))


def _package(entry: EntryPoint) -> str:
    return "without a name" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
