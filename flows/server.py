"""The Prefect server of a command that was given none: a child process that lives no longer than the command.

Prefect (3.9.1) would start one by itself, but leaves it behind when the command is killed. This one begins before heavy
libraries are imported, so both start at once, and it ends when its standard input does, however the command ended.
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
from pathlib import Path

from storage.errors import StorageError
from storage.home import Home, exclusive

_STARTUP_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 20.0


@contextmanager
def own_server(home: Home) -> Iterator[Callable[[], None]]:
    """Run a server with its state under the home, unless `PREFECT_API_URL` names one.

    Call it before Prefect is imported.

    Args:
        home: The home.

    Yields:
        A function that waits until the server answers; call it before the first flow.
    """
    if "PREFECT_API_URL" in os.environ:
        yield lambda: _require_server(os.environ["PREFECT_API_URL"])
        return
    log = home.prefect / "server.log"
    try:
        log.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(f"{log.parent} cannot be made ({error.strerror}): move away what is there") from error
    with ExitStack() as starting:
        # Two servers that make one database at once break each other: the other one starts when this one answers.
        starting.enter_context(exclusive(home, "prefect-server"))
        with socket.create_server(("127.0.0.1", 0)) as listening, log.open("ab") as stream:
            port = int(listening.getsockname()[1])
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "flows.server", str(listening.fileno())],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                pass_fds=[listening.fileno()],
                start_new_session=True,  # an interrupt from the keyboard is for the command alone
            )

        def wait() -> None:
            _wait(port, process, log)
            starting.close()

        os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
        try:
            yield wait
        finally:
            del os.environ["PREFECT_API_URL"]
            _stop(process)


def _require_server(url: str) -> None:
    """Refuse a server that is not there; Prefect itself would say so in a hundred lines."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=_ANSWER_TIMEOUT_S):
            return
    except urllib.error.HTTPError as error:
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
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_STARTUP_TIMEOUT_S)
        try:
            connection.request("GET", "/api/health")
            if connection.getresponse().status == http.HTTPStatus.OK:
                return
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    raise StorageError(
        f"Prefect's own server did not start, {log} says why: "
        "move that folder away, or name a running server with PREFECT_API_URL"
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
