"""What a request can choose by name: our own, and what packages that someone else installed offer.

A package offers a method, say, by an entry point: a name in the group `kvpolicy.methods` that leads to a class. Nothing
of it is imported before it is asked for by that name. Not for the choices themselves: each kind has a `registry.py`
beside its own files.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Generic, TypeAlias, TypeVar

from kvpolicy.errors import InputError, first_line

T = TypeVar("T")
Extension: TypeAlias = Any
"""An entry point: of importlib.metadata, or of its backport, which replaces it where some package imports that."""


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

    def __init__(self, kind: str, builtin: Mapping[str, T], *, check: Callable[[str, Any], str]) -> None:
        """Register our own; packages are looked for when names are first asked for.

        Args:
            kind: A noun, such as `method`; the group of entry points is its plural.
            builtin: Our own, by name.
            check: Says in a few words what is wrong with a choice of that name that a package offers; nothing if it
                can be used.
        """
        self._kind, self._own, self._check = kind, builtin, check
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
            self._loaded[name] = self._load(name, self._extension(name))
        return self._loaded[name]

    def choices(self, names: Iterable[str]) -> tuple[Choice, ...]:
        """What the results of a request that chose these names depend on, each once.

        Raises:
            InputError: As for `[]`.
        """
        return tuple(dict.fromkeys(self._choice(name) for name in names))

    def _choice(self, name: str) -> Choice:
        chosen: Any = self[name]
        module = getattr(chosen, "module", chosen.__module__)  # an instance names the module of what it is made of
        if name in self._own:
            return Choice(module=module)
        package, version = _package(self._extension(name))
        return Choice(module=module, package=package, version=version)

    def _extension(self, name: str) -> Extension:
        if name not in self.names:
            raise InputError(f"{self._kind} {name!r} is unknown, expected one of {', '.join(self.names)}")
        return self._offered()[name]

    def _load(self, name: str, extension: Extension) -> T:
        try:
            made: T = extension.load()
        except Exception as error:  # whatever importing somebody's package may raise
            reason = f"{type(error).__name__}: {first_line(error)}"
        else:
            reason = self._check(name, made)
        if reason:
            package = package_name(extension)
            raise InputError(f"{self._kind} {name!r} of {package} cannot be used: {reason}; mend or uninstall it")
        return made

    def _offered(self) -> Mapping[str, Extension]:
        offered: dict[str, Extension] = {}
        for extension in installed_extensions(self._kind):
            name, other = extension.name, offered.get(extension.name)
            if name in self._own or (other is not None and other.value != extension.value):
                raise InputError(
                    f"{package_name(extension)} offers a {self._kind} {name!r}, a name that "
                    f"{package_name(other) if other else 'kvpolicy itself'} has: rename it, or uninstall one of them"
                )
            offered[name] = extension
        return offered


@functools.cache
def installed_extensions(kind: str) -> tuple[Extension, ...]:
    """What installed packages offer of one kind, in the order of their names."""
    return tuple(sorted(entry_points(group=f"kvpolicy.{kind}s"), key=lambda entry: (entry.name, *_package(entry))))


def package_name(extension: Extension) -> str:
    """The package that offers an extension, as errors name it."""
    return " ".join(("package", *_package(extension)))


def _package(extension: Extension) -> tuple[str, str]:
    assert extension.dist is not None  # entry points of installed packages have one
    return extension.dist.name, extension.dist.version
