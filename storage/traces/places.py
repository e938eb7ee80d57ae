"""Where a trace store lies: a folder or a prefix of an object store, behind the same few verbs.

Objects are put whole: a reader sees all of one or nothing, and of two writers of one name the last counts; only
`Place.create` lets the first one win. Nothing else is asked of a place, in particular no rename, which object stores
do not have. docs/how-to/new-storage-backend.md adds an object store.

Credentials and endpoints come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...) and are never stored.
"""

from __future__ import annotations

import datetime as dt
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy.errors import first_line
from storage.errors import StorageError, remedy_for

_PART = re.compile(r"#\d+$")


def _allow_http() -> Mapping[str, str]:
    """An endpoint without TLS is used where the environment names one."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", ""))
    return {"allow_http": str(endpoint.startswith("http://")).lower()}


@dataclass(frozen=True, kw_only=True)
class ObjectStore:
    """A kind of object store that obstore and Lance reach by the same URLs.

    Attributes:
        form: how its URLs look, for people.
        pattern: what its URLs match as a whole. What follows ? or # of a URL is not part of its path.
        options: options of its client, beyond what the environment says.
    """

    form: str
    pattern: str
    options: Callable[[], Mapping[str, str]] = dict


OBJECT_STORES = {
    "s3": ObjectStore(form="s3://bucket/prefix", pattern=r"s3://[^/\s?#]+(/[^\s?#]*)?", options=_allow_http),
}
"""Every kind of object store, by the scheme of its URLs."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A folder or a prefix of an object store; make one with `Place.at`.

    Attributes:
        url: absolute path of the folder, or a URL of one of `OBJECT_STORES`.
    """

    url: str

    @classmethod
    def at(cls, url: str | Path) -> Place:
        """Return the place of a folder's path or of a URL; nothing is made or asked yet.

        Raises:
            StorageError: if the URL is of another kind or names no bucket, or no folder can have that name.
        """
        text = str(url)
        if "://" not in text:
            try:
                path = Path(text).expanduser().absolute()
                path.exists()  # a name may be too long to ask
            except (OSError, RuntimeError) as error:  # RuntimeError: there is no such user
                raise StorageError(f"place {text[:80]} cannot be used: {first_line(error)}") from error
            return cls(url=str(path))
        kind = OBJECT_STORES.get(text.partition("://")[0])
        if kind is None or not re.fullmatch(kind.pattern, text):
            forms = " or ".join(store.form for store in OBJECT_STORES.values())
            raise StorageError(f"place {text!r}: expected a folder or {forms}, without ? and #")
        return cls(url=text.rstrip("/"))

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of this machine."""
        return self._store is None

    def join(self, name: str) -> str:
        """Return the path or URL of something in it."""
        return f"{self.url}/{name}"

    @property
    def table_options(self) -> Mapping[str, str]:
        """Options of Lance for a table here."""
        return {} if self._store is None else self._store.options()

    @property
    def _store(self) -> ObjectStore | None:
        scheme, separator, _ = self.url.partition("://")
        return OBJECT_STORES[scheme] if separator else None

    def read(self, name: str) -> bytes | None:
        """Return an object's content; None if there is none of that name.

        Raises:
            StorageError: if the place cannot be reached or refuses.
        """
        if self._is_missing():
            return None
        with self._one_line_errors(f"cannot read {name}"):
            try:
                return bytes(self._objects.get(name).bytes())
            except FileNotFoundError:
                return None

    def exists(self, name: str) -> bool:
        """Whether there is an object of that name.

        Raises:
            StorageError: if the place cannot be reached or refuses.
        """
        if self._is_missing():
            return False
        with self._one_line_errors(f"cannot look for {name}"):
            try:
                self._objects.head(name)
            except FileNotFoundError:
                return False
        return True

    def write(self, name: str, content: bytes) -> None:
        """Put an object; what has that name is replaced at once.

        Raises:
            StorageError: if the place cannot be reached, is full or refuses.
        """
        with self._one_line_errors(f"cannot write {name}"):
            self._objects.put(name, content)

    def create(self, name: str, content: bytes) -> bool:
        """Put an object unless there is one of that name; returns whether it was put. Of many at once one wins.

        Raises:
            StorageError: if the place cannot be reached, is full or refuses.
        """
        from obstore.exceptions import AlreadyExistsError

        with self._one_line_errors(f"cannot write {name}"):
            try:
                self._objects.put(name, content, mode="create")
            except (AlreadyExistsError, FileExistsError):
                return False
        return True

    def folders(self, name: str) -> list[str]:
        """Return the names of what lies below a name and has more below it, sorted.

        Raises:
            StorageError: if the place cannot be reached or refuses.
        """
        if self._is_missing():
            return []
        with self._one_line_errors(f"cannot list {name}"):
            prefixes = self._objects.list_with_delimiter(f"{name}/")["common_prefixes"]
        return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in prefixes)

    def newest(self, name: str) -> dt.datetime | None:
        """Return when something below a name was last written, by the place's own clock; None if nothing is there.

        Raises:
            StorageError: if the place cannot be reached or refuses.
        """
        times = [entry["last_modified"] for entry in self._list(name)]
        if self.is_local:
            times += _times_of_remains(Path(self.join(name)))
        return max(times, default=None)

    def remove(self, name: str, *, first: str) -> None:
        """Remove everything below a name, ``first`` of all the object that makes it count.

        Raises:
            StorageError: if the place cannot be reached or refuses.
        """
        paths = [entry["path"] for entry in self._list(name)]
        ordered = sorted(paths, key=lambda path: path != f"{name}/{first}")
        with self._one_line_errors(f"cannot remove {name}"):
            for part in (ordered[:1], ordered[1:]):
                if part:
                    self._objects.delete(part)
        if self.is_local:
            _remove_remains(Path(self.join(name)))

    def _list(self, name: str) -> list[Any]:
        if self._is_missing():
            return []
        with self._one_line_errors(f"cannot list {name}"):
            return list(self._objects.list(f"{name}/").collect())

    def reader(self) -> Any:
        """Return the Zarr store to read arrays from."""
        if self.is_local:  # a fifth quicker than through `obstore`
            from zarr.storage import LocalStore

            return LocalStore(self.url, read_only=True)
        return self.writer(read_only=True)

    def writer(self, *, read_only: bool = False) -> Any:
        """Return the Zarr store to write arrays to; every chunk or shard appears whole or not at all."""
        from zarr import storage

        return storage.ObjectStore(self._objects, read_only=read_only)

    def _is_missing(self) -> bool:
        return self.is_local and not Path(self.url).exists()

    @functools.cached_property
    def _objects(self) -> Any:
        from obstore.store import LocalStore, from_url

        with self._one_line_errors("cannot be opened"):
            if self._store is None:
                return LocalStore(self.url, mkdir=True)
            options: Any = self._store.options()  # obstore's types name the options of all its clients
            return from_url(self.url, client_options=options)

    @contextmanager
    def _one_line_errors(self, what: str) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            raise StorageError(f"{self.url}: {what}: {first_line(error)}{remedy_for(error)}") from error


def _remains(root: Path) -> list[Path]:
    """What only a file system has: folders, and parts of objects ("0#1" of "0") whose writers were killed."""
    return [path for path in [root, *root.rglob("*")] if path.is_dir() or _PART.search(path.name)]


def _times_of_remains(root: Path) -> list[dt.datetime]:
    times = []
    for path in _remains(root):
        with suppress(OSError):  # it has become an object, or is gone
            times.append(dt.datetime.fromtimestamp(path.stat().st_mtime, dt.UTC))
    return times


def _remove_remains(root: Path) -> None:
    for path in sorted(_remains(root), reverse=True):
        with suppress(OSError):  # a writer may fill a folder again at any moment
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()
