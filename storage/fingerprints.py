"""Stage keys and code fingerprints: when a result may be used again.

A stage's key covers its inputs' digests, its parameters and the code that it runs. The code is found without
importing it: the stage's module and every project module that it imports, directly or not. A module's digest follows
the meaning of its source: the syntax tree without docstrings, comments and layout, in a form that is the same under
every release of Python that parses it alike. Not for walking recorded lineage (`storage.lineage.graph`), nor for what
else surrounds a run (`storage.environment`).
"""

from __future__ import annotations

import ast
import importlib.util
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy.digests import digest_bytes, digest_json
from storage.errors import StorageError

# Python 3.11 parses in one thread at a time, or fails: python/cpython#106905.
_PARSING = threading.Lock()
_IMPORTERS_BY_NAME = frozenset({"import_module", "iter_modules", "walk_packages", "__import__"})


def stage_key(stage: str, *, inputs: Mapping[str, str], parameters: Mapping[str, Any], code: str) -> str:
    """Return the key (64 hexadecimal characters) of a stage's result: same key, same result.

    Args:
        stage: name of the stage.
        inputs: role of each input -> its content digest or artifact id.
        parameters: everything else that the result depends on, as JSON values.
        code: digest of the code (`ProjectCode.module_digests`).

    Raises:
        StorageError: if a parameter is no JSON value.
    """
    return digest_json({"stage": stage, "inputs": dict(inputs), "parameters": dict(parameters), "code": code})


@dataclass(frozen=True)
class _Module:
    """Digest of a module's meaning, and the names that it imports, some of which may be modules."""

    digest: str
    imports: tuple[str, ...]


class ProjectCode:
    """The sources of some packages, each read once: files that change later change no digest of this object."""

    def __init__(self, *packages: str) -> None:
        """Find the packages, without importing them.

        Args:
            packages: names of top-level packages; the package of a module that is asked for is one of them as well.
        """
        self._packages = packages
        self._modules: dict[str, _Module | None] = {}  # None for a name that is not a module of the packages

    def module_digests(self, *modules: str, without: Collection[str] = ()) -> dict[str, str]:
        """Return name -> digest of some modules and of all modules that they can reach by imports.

        Imports inside functions count; so do the packages' own ``__init__`` modules, which Python runs on the way. A
        module that imports by name at run time (``import_module``, ``iter_modules`` and the like) reaches its whole
        package.

        Args:
            modules: where to begin.
            without: names of modules that are left out, with all that only they reach.

        Raises:
            StorageError: if a module is not found or a source is no Python.
        """
        roots = _package_roots({*self._packages, *(name.partition(".")[0] for name in modules)})
        digests: dict[str, str] = {}
        waiting = list(modules)
        while waiting:
            name = waiting.pop()
            if name in digests or name in without:
                continue
            module = self._read(name, roots)
            if module is not None:
                digests[name] = module.digest
                waiting += module.imports
        if missing := [name for name in modules if name not in digests and name not in without]:
            raise StorageError(
                f"no module {missing[0]} in the packages {', '.join(sorted(roots))}: cannot fingerprint its code"
            )
        return digests

    def _read(self, name: str, roots: Mapping[str, Path]) -> _Module | None:
        if name not in self._modules:
            path = _source_of(name, roots)
            self._modules[name] = None if path is None else _module(name, path, roots)
        return self._modules[name]


def _module(name: str, path: Path, roots: Mapping[str, Path]) -> _Module:
    try:
        tree = _parsed(path.read_bytes())
    except SyntaxError as error:
        raise StorageError(f"{path} is no Python: line {error.lineno}: {error.msg}") from error
    imports = [*_parents(name), *_imports(tree, name, is_package=path.name == "__init__.py", roots=roots)]
    digest = digest_bytes("".join(_normal_form(tree)).encode())
    return _Module(digest=digest, imports=tuple(dict.fromkeys(imports)))


def _normal_form(node: Any) -> Iterator[str]:
    """Yield the parts of a text that two sources share if and only if they mean the same, as far as syntax says.

    Statements that are a text alone, such as docstrings, do nothing and are left out. So are empty fields, which other
    releases of Python do not have.
    """
    if isinstance(node, ast.AST):
        yield f"{type(node).__name__}("
        for field, value in ast.iter_fields(node):
            if value not in (None, []):
                yield f"{field}="
                yield from _normal_form(value)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for item in node:
            if not _is_bare_text(item):
                yield from _normal_form(item)
        yield "]"
    else:
        yield f"{node!r},"


def _is_bare_text(node: Any) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def _package_roots(packages: set[str]) -> dict[str, Path]:
    """Folder of each package; of a top-level module that is a single file, that file."""
    roots = {}
    for package in packages:
        try:
            spec = importlib.util.find_spec(package)  # a top-level name: found, not imported
        except (ImportError, ValueError):
            spec = None
        if spec is not None and spec.submodule_search_locations:
            roots[package] = Path(next(iter(spec.submodule_search_locations)))
        elif spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            roots[package] = Path(spec.origin)
    return roots


def _source_of(name: str, roots: Mapping[str, Path]) -> Path | None:
    top, *parts = name.split(".")
    if top not in roots:
        return None
    if roots[top].suffix == ".py":
        return None if parts else roots[top]
    place = roots[top].joinpath(*parts)
    candidates = (place / "__init__.py", place.with_suffix(".py")) if parts else (place / "__init__.py",)
    return next((path for path in candidates if path.is_file()), None)


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _parsed(source: bytes) -> ast.Module:
    with _PARSING:
        try:
            return ast.parse(source)
        except SystemError:  # a library has parsed in another thread meanwhile
            return ast.parse(source)


def _imports(tree: ast.AST, name: str, *, is_package: bool, roots: Mapping[str, Path]) -> Iterator[str]:
    """Yield names that may be modules: for ``from a import b`` both ``a`` and ``a.b``."""
    package = name if is_package else name.rpartition(".")[0]
    dynamic = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                ancestor = package.rsplit(".", node.level - 1)[0]
                base = f"{ancestor}.{base}" if base else ancestor
            targets = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            called = getattr(node, "attr", getattr(node, "id", ""))
            dynamic = dynamic or called in _IMPORTERS_BY_NAME
            continue
        yield from targets
    if dynamic:
        yield from _modules_below(package, roots)


def _modules_below(package: str, roots: Mapping[str, Path]) -> Iterator[str]:
    top, *parts = package.split(".")
    if top not in roots:
        return
    folder = roots[top].joinpath(*parts)
    for path in folder.rglob("*.py"):
        names = path.relative_to(folder).with_suffix("").parts
        yield ".".join((package, *(part for part in names if part != "__init__")))
