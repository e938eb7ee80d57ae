"""The databases of MLflow and Prefect: whether one can be used, said before either tries for minutes."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from pathlib import Path
from urllib.parse import quote, unquote

from kvpolicy.errors import first_line
from storage.errors import StorageError

_CONNECT_TIMEOUT_S = 10
_PASSWORDS = re.compile(r"(?P<before>^[\w+]+://[^:@/]*):[^@/]*(?=@)|[?&]password=[^&]*")


def sqlite_uri(path: Path, driver: str = "") -> str:
    """Return the URI of an SQLite file for SQLAlchemy (from 2.1), which decodes the path in it.

    Args:
        path: absolute path of the file.
        driver: the driver; where the path has to be encoded one is named in any case. MLflow (3.17) makes the folder
            that the text of a ``sqlite:///`` URI names, without decoding it, and of no other URI.
    """
    encoded = quote(str(path))
    driver = driver or ("" if encoded == str(path) else "pysqlite")
    return f"{'+'.join(filter(None, ('sqlite', driver)))}:///{encoded}"


def sqlite_path(uri: str) -> Path:
    """Return the file that SQLAlchemy opens for an SQLite URI; `:memory:` for none."""
    return Path(unquote(uri.partition(":///")[2].partition("?")[0]) or ":memory:")


def require_sqlite(path: Path) -> None:
    """Refuse a file that is no SQLite database or cannot be written; one that is not there yet may be made.

    Raises:
        StorageError: if it is so.
    """
    if not path.exists():
        return
    # SQLite writes beside the file as well.
    if locked := [place for place in (path, path.parent) if not os.access(place, os.W_OK)]:
        raise StorageError(f"the database {path} is read-only: make {locked[0]} writable, or use another --home")
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=0.5)
        ) as connection:
            connection.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
            return  # someone is writing
        raise StorageError(
            f"the database {path} cannot be read ({first_line(error)}): restore it, or move it away for a new one"
        ) from error


def require_postgresql(uri: str) -> None:
    """Refuse a database that cannot be reached or written.

    Args:
        uri: postgresql://user@host:port/database, or with a driver as in postgresql+asyncpg://.

    Raises:
        StorageError: if it is no such URI, the driver is missing, nobody answers, or it is read-only.
    """
    shown, plain = without_password(uri), _plain(uri)
    try:
        import psycopg2
    except ImportError as error:
        raise StorageError(f"{shown} needs PostgreSQL's driver: pip install 'kvpolicy[postgres]'") from error
    try:
        with contextlib.closing(psycopg2.connect(plain, connect_timeout=_CONNECT_TIMEOUT_S)) as connection:
            cursor = connection.cursor()
            cursor.execute(
                "SELECT current_setting('transaction_read_only') = 'on',"
                " coalesce(has_schema_privilege(current_schema(), 'CREATE'), false)"
            )
            read_only, may_create = cursor.fetchone()
    except (psycopg2.Error, UnicodeError) as error:
        raise StorageError(
            f"the database {shown} cannot be used ({first_line(error)}): start it, or mend its URI"
        ) from error
    if read_only or not may_create:
        why = "is read-only" if read_only else "has no schema that this user may write"
        raise StorageError(f"the database {shown} {why}: name another one, or a user who may write")


def database_of_mlflow(uri: str) -> str:
    """Return a URI as MLflow is to have it: with the driver that is installed, and without a password.

    SQLAlchemy 2.1 takes another driver for postgresql:// than the releases before did, so the driver is named.

    Raises:
        StorageError: if it is no URI of PostgreSQL, or has a password, which would be noted and shown with it.
    """
    if without_password(uri) != uri:
        raise StorageError(
            f"the database {without_password(uri)} is noted in the home, and its password must not be: "
            "put that into ~/.pgpass or PGPASSWORD"
        )
    return _plain(uri).replace("postgresql://", "postgresql+psycopg2://", 1)


def without_password(uri: str) -> str:
    """Return a URI as it may be shown."""
    return _PASSWORDS.sub(lambda match: match["before"] or "", uri)


def _plain(uri: str) -> str:
    """The URI as libpq takes it, without SQLAlchemy's driver."""
    scheme, separator, rest = uri.partition("://")
    if scheme.partition("+")[0] not in ("postgresql", "postgres") or not separator:
        raise StorageError(f"{without_password(uri)!r} is no database that is known: give postgresql://user@host/name")
    return f"postgresql://{rest}"
