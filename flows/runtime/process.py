"""Preparing the process that runs a pipeline: where Prefect keeps its state, and quiet libraries.

Called by entry points and by flows when they start, never at import.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.database import sqlite_path, sqlite_uri
from storage.errors import StorageError
from storage.home import Home

DEFAULT_HOME = ".kvp"
_NO_PROXY = ("no_proxy", "NO_PROXY")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def home_path(home: str | None) -> Path:
    """The home that was asked for: the argument, `KVP_HOME`, or `./.kvp`.

    Raises:
        StorageError: If there is no such user or working folder, or the name is too long.
    """
    asked = home or os.environ.get("KVP_HOME") or DEFAULT_HOME
    try:
        path = Path(asked).expanduser().absolute()
        path.exists()  # a name may be too long to ask
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"home {asked[:80]} cannot be used ({reason}): choose another --home") from error
    return path


def open_home(home: str | None, *, traces: str | None = None) -> Home:
    """Open the home that was asked for, made if it is new; its traces lie at `traces`, `KVP_TRACES` or in it.

    MLflow's runs are in the database that `KVP_MLFLOW_URI` names, or in it.

    Raises:
        StorageError: If it cannot be used, or its traces or MLflow's runs lie elsewhere.
    """
    return Home.open(
        home_path(home),
        traces=traces or os.environ.get("KVP_TRACES"),
        mlflow=os.environ.get("KVP_MLFLOW_URI") or None,
    )


def existing_home(home: str | None) -> Home:
    """Open the home that was asked for, which must exist.

    Raises:
        StorageError: If it does not exist or cannot be used.
    """
    return Home.open(home_path(home), create=False)


def prepared_home(home: str | None) -> Home:
    """Open an existing home for a command that loads torch and Prefect, once both are configured for it.

    Raises:
        StorageError: If it does not exist or cannot be used.
    """
    configure_libraries()
    opened = existing_home(home)
    point_prefect_at(opened.path)
    return opened


def watched_sources() -> list[str]:
    """The sources of models that `KVP_WATCH` names, between commas."""
    return [part.strip() for part in os.environ.get("KVP_WATCH", "").split(",") if part.strip()]


def point_prefect_at(home: Path) -> None:
    """Keep Prefect's state under the home, unless a server is configured. Call it before Prefect is imported."""
    # A server still gets the logs, with tracebacks; on a terminal an error is one line.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_INTERNAL_LOGGING_LEVEL", "CRITICAL")
    if os.environ.get("PREFECT_API_URL"):
        return
    os.environ.pop("PREFECT_API_URL", None)  # an empty one names no server
    os.environ["PREFECT_HOME"] = str(home / "prefect")
    _name_database(home / "prefect" / "prefect.db")
    defaults = {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "DO_NOT_TRACK": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _name_database(path: Path) -> None:
    """Name the database of Prefect's home where Prefect (3.9) names another, as it puts the plain path into a URI."""
    uri = sqlite_uri(path, "aiosqlite")
    if sqlite_path(uri) != sqlite_path(f"sqlite+aiosqlite:///{path}") and not any(
        name.startswith(("PREFECT_SERVER_DATABASE_", "PREFECT_API_DATABASE_")) for name in os.environ
    ):
        os.environ["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = uri


def reach_loopback_directly() -> None:
    """Keep what this process and those that it starts ask of this machine from a proxy that is set for the network.

    Prefect's server, MLflow's and all other services of a home listen on loopback, which no proxy reaches for us.
    """
    named = {name: os.environ.get(name, "") for name in _NO_PROXY}
    for name, value in named.items():
        # Libraries read one name or the other, so the one that is not set takes the other's hosts over.
        hosts = [host.strip() for host in (value or "".join(named.values())).split(",") if host.strip()]
        if "*" not in hosts:
            os.environ[name] = ",".join(dict.fromkeys([*hosts, *_LOOPBACK]))


@contextmanager
def standard_output_kept_clean() -> Iterator[None]:
    """Send what libraries and child processes print to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def environment_with(**variables: str) -> Iterator[None]:
    """Set variables of the environment for as long as the block lasts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def configure_libraries() -> None:
    """Set what libraries read from the environment when they load; call it before torch is imported."""
    defaults = {
        # OpenMP's waiting threads spin otherwise: on busy cores that makes small products ten times slower.
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_VERBOSITY": "error",  # what it tries again is no news; that it failed is told in one line
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not sys.stderr.isatty():
        defaults["TQDM_DISABLE"] = "1"  # transformers converts under a bar of tqdm's own
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def prepare_process() -> None:
    """Show our progress on standard error, and not that of libraries."""
    configure_libraries()
    reach_loopback_directly()
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logger = logging.getLogger("kvpolicy")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False  # Prefect's root handler would say every line twice
