"""Stage keys and code fingerprints: when a result may be used again.

A stage's key covers its inputs' digests, its parameters and the code that it runs. The code is found without
importing it: the sources of the stage's module and of every project module that it imports, directly or not. Not for
walking recorded lineage (`storage.graph`), nor for what else surrounds a run (`storage.environment`).
"""

from __future__ import annotations

import ast
import importlib.util
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from storage.digests import digest_bytes, digest_json
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
        code: fingerprint of the code (`code_fingerprint`).

    Raises:
        StorageError: if a parameter is no JSON value.
    """
    return digest_json({"stage": stage, "inputs": dict(inputs), "parameters": dict(parameters), "code": code})


def code_fingerprint(
    module: str, packages: Sequence[str] = ("kvpolicy", "tasks"), without: Collection[str] = ()
) -> str:
    """Digest the sources of a module and of all modules of ``packages`` that it can reach by imports.

    Modules named in ``without`` are left out, with what only they reach.

    Imports inside functions count; so do the packages' own ``__init__`` modules, which Python runs on the way. A
    module that imports by name at run time (``import_module``, ``iter_modules`` and the like) reaches its whole
    package.

    Raises:
        StorageError: if the module is not found or a source is no Python.
    """
    return digest_json(module_digests(module, packages, without))


def module_digests(
    module: str, packages: Sequence[str] = ("kvpolicy", "tasks"), without: Collection[str] = ()
) -> dict[str, str]:
    """Return what `code_fingerprint` covers: name of each module -> digest of its source.

    Raises:
        StorageError: as `code_fingerprint`.
    """
    roots = _package_roots({module.partition(".")[0], *packages})
    if _source_of(module, roots) is None:
        raise StorageError(
            f"no module {module} in the packages {', '.join(sorted(roots))}: cannot fingerprint its code"
        )
    digests: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _source_of(name, roots)
        if name in digests or path is None or name in without:
            continue
        source = path.read_bytes()
        digests[name] = digest_bytes(source)
        waiting.extend(_parents(name))
        try:
            tree = _parsed(source)
        except SyntaxError as error:
            raise StorageError(f"{path} is no Python: line {error.lineno}: {error.msg}") from error
        waiting.extend(_imports(tree, name, is_package=path.name == "__init__.py", roots=roots))
    return digests


def _package_roots(packages: set[str]) -> dict[str, Path]:
    roots = {}
    for package in packages:
        try:
            spec = importlib.util.find_spec(package)  # a top-level name: found, not imported
        except (ImportError, ValueError):
            spec = None
        if spec is not None and spec.submodule_search_locations:
            roots[package] = Path(next(iter(spec.submodule_search_locations)))
    return roots


def _source_of(name: str, roots: Mapping[str, Path]) -> Path | None:
    top, *parts = name.split(".")
    if top not in roots:
        return None
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
