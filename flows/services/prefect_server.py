"""Which Prefect server a command uses, and the one of a command that has none.

That one is a child process that lives no longer than the command. Prefect (3.9.1) would start one by itself, but leaves
it behind when the command is killed. This one begins before heavy libraries are imported, so both start at once, and it
ends when its standard input does, however the command ended. `flows.services.lifecycle` makes the server of `kvp up`.
"""

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from flows.runtime.process import environment_with
from flows.services.processes import SERVER, Service, answers, last_error, recorded, wait_for
from flows.services.recovery import UnfinishedRun, marked_process, recover
from kvpolicy.errors import first_line
from storage.database import require_postgresql, require_sqlite, sqlite_path
from storage.errors import StorageError
from storage.home import Home, exclusive

SERVER_LOCK = "prefect-server"
HEARTBEAT_S = "30"  # Prefect sends none more often
_DATABASE_VARIABLES = ("PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_DATABASE_CONNECTION_URL")
_RETRIES = "2"  # this server does not come back; by default every call that is left would wait a minute for it
_STARTUP_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 20.0


@contextmanager
def own_server(home: Home) -> Iterator[Callable[[], list[UnfinishedRun]]]:
    """Give a command its server: the one that `PREFECT_API_URL` names, that `kvp up` runs for the home, or its own.

    Its own has its state under the home and ends with it. Call this before Prefect is imported.

    Args:
        home: The home.

    Yields:
        A function that waits until the server answers, and gives the flow runs of the home that were found dead; call
        it before the first flow.
    """
    _require_usable_proxies()
    with ExitStack() as stack:
        if "PREFECT_API_URL" in os.environ:
            wait, own_state = partial(_require_server, os.environ["PREFECT_API_URL"]), False
        elif (running := recorded(home, SERVER)) is not None and running.runs:
            wait, own_state = stack.enter_context(_home_server(running)), True
        else:
            wait, own_state = stack.enter_context(_started_server(home)), True
        mark = stack.enter_context(marked_process(home)) if own_state else ""

        def ready() -> list[UnfinishedRun]:
            wait()
            if not own_state:
                return []
            from prefect import tags

            stack.enter_context(tags(mark))
            return recover(home)

        yield ready


@contextmanager
def _home_server(service: Service) -> Iterator[Callable[[], None]]:
    """The server that `kvp up` started."""
    url = f"{service.url}/api"
    with environment_with(PREFECT_API_URL=url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY=HEARTBEAT_S):
        yield lambda: wait_for(service, f"{url}/health")


@contextmanager
def _started_server(home: Home) -> Iterator[Callable[[], None]]:
    """A server that lives no longer than the command."""
    require_database(home)
    log = home.prefect / "server.log"
    try:
        log.parent.mkdir(exist_ok=True)
        log.touch()
    except OSError as error:
        raise StorageError(
            f"{log} cannot be written ({error.strerror}): make {log.parent} writable, or move away what is there"
        ) from error
    with ExitStack() as starting:
        # Two servers that make one database at once break each other: the other one starts when this one answers.
        starting.enter_context(exclusive(home, SERVER_LOCK))
        with socket.create_server(("127.0.0.1", 0)) as listening, log.open("ab") as stream:
            port = int(listening.getsockname()[1])
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "flows.services.prefect_server", str(listening.fileno())],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                pass_fds=[listening.fileno()],
                start_new_session=True,  # an interrupt from the keyboard is for the command alone
            )

        def wait() -> None:
            _wait(port, process, log)
            starting.close()

        try:
            with environment_with(PREFECT_API_URL=f"http://127.0.0.1:{port}/api", PREFECT_CLIENT_MAX_RETRIES=_RETRIES):
                yield wait
        finally:
            _stop(process)


def require_database(home: Home) -> None:
    """Refuse a database of Prefect's, the home's own or one that is named, that cannot be reached or written.

    Raises:
        StorageError: If it cannot.
    """
    url = next((os.environ[name] for name in _DATABASE_VARIABLES if os.environ.get(name)), "")
    if not url:
        require_sqlite(home.prefect / "prefect.db")
    elif url.startswith("sqlite"):
        require_sqlite(sqlite_path(url))
    else:
        require_postgresql(url)


def _require_usable_proxies() -> None:
    """Refuse proxies that httpx, and so Prefect's client, cannot make a client with, whatever host it is to ask.

    SOCKS takes another package, which nobody else needs.
    """
    import httpx

    try:
        httpx.Client(verify=False).close()  # asks nobody anything
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise StorageError(
            f"the proxies that the environment names cannot be used ({first_line(error)}): "
            "mend or unset HTTP_PROXY, HTTPS_PROXY and ALL_PROXY, in upper and lower case"
        ) from error


def _require_server(url: str) -> None:
    """Refuse a server that is not there; Prefect itself would say so in a hundred lines."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=_ANSWER_TIMEOUT_S):
            return
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        if error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR:
            return  # it answers; what it wants is between Prefect and its settings
        raise StorageError(
            f"the Prefect server at {url}, which PREFECT_API_URL names, answers {error.code} ({error.reason}): "
            "mend or restart it, or unset the variable"
        ) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise StorageError(
            f"no Prefect server answers at {url}, which PREFECT_API_URL names ({getattr(error, 'reason', error)}): "
            "start it, or unset the variable"
        ) from error


def _wait(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _STARTUP_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if answers(f"http://127.0.0.1:{port}/api/health", timeout_s=_STARTUP_TIMEOUT_S):
            return
        time.sleep(0.1)
    raise StorageError(
        f"Prefect's own server did not start ({last_error(log)}), {log} says why: "
        "move away the folder or mend the database that has its state, or name a running server with PREFECT_API_URL"
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def main() -> None:
    """Serve on an inherited socket until told to stop, or until the parent is gone."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import uvicorn
    from prefect.server.api.server import create_app

    config = uvicorn.Config(create_app(ephemeral=True, final=True), log_level="error", lifespan="on")
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(sys.argv[1]))])


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
