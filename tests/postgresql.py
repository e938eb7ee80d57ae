"""A real PostgreSQL server on loopback, with a cluster of the tests' own."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.object_store import free_port

_STARTS_WITHIN_S = 60


@dataclass(frozen=True, kw_only=True)
class PostgresqlServer:
    """A server that runs.

    Attributes:
        port: where it listens, on loopback.
        programs: folder of PostgreSQL's programs.
    """

    port: int
    programs: Path

    def uri(self, database: str, *, user: str = "kvp") -> str:
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def run(self, statement: str, *, database: str = "postgres") -> str:
        """Run a statement and return what it prints."""
        command = [str(self.programs / "psql"), "-X", "-q", "-t", "-A", "-v", "ON_ERROR_STOP=1", "-c", statement]
        done = subprocess.run([*command, self.uri(database)], capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.strip()

    def make_database(self, name: str) -> str:
        """Make an empty database and return its URI."""
        self.run(f'CREATE DATABASE "{name}"')
        return self.uri(name)


def with_asyncpg(uri: str) -> str:
    """A URI as Prefect takes it."""
    return uri.replace("postgresql://", "postgresql+asyncpg://", 1)


def find_programs() -> Path | None:
    """Folder of the newest PostgreSQL programs of this machine; None if there is none."""
    named = shutil.which("pg_ctl")
    found = [Path(named).parent] if named else []
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    return next((folder for folder in found if (folder / "initdb").exists() and (folder / "psql").exists()), None)


@contextmanager
def postgresql_server(programs: Path) -> Iterator[PostgresqlServer]:
    """Run a server on a new cluster; both are gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="kvp-postgresql-"))  # pytest's folders are closed to other users
    port = free_port()
    as_user = _as_unprivileged(folder)
    cluster, log = folder / "cluster", folder / "log"
    # Nothing of it outlives the tests, so nothing has to be on the disk.
    options = f"-h 127.0.0.1 -p {port} -k {folder} -c fsync=off -c max_connections=200"
    control = [str(programs / "pg_ctl"), "-D", str(cluster), "-w", "-t", str(_STARTS_WITHIN_S)]
    try:
        _run(as_user, [str(programs / "initdb"), "-D", str(cluster), "-U", "kvp", "-A", "trust", "-E", "UTF8", "-N"])
        _run(as_user, [*control, "-l", str(log), "-o", options, "start"])
        try:
            yield PostgresqlServer(port=port, programs=programs)
        finally:
            _run(as_user, [*control, "-m", "immediate", "stop"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _as_unprivileged(folder: Path) -> list[str]:
    """What goes before a command: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return []
    names = {entry.pw_name for entry in pwd.getpwall()}
    user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
    os.chown(folder, user.pw_uid, user.pw_gid)
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]


def _run(as_user: Sequence[str], command: Sequence[str]) -> None:
    done = subprocess.run(
        [*as_user, *command],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # a pipe would stay open as long as the server does
        stderr=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
        timeout=2 * _STARTS_WITHIN_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}")
