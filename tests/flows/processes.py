"""Starting and ending the processes of integration tests, and commands that end by themselves."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback, whatever proxy is set
QUIET = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1", "NO_COLOR": "1", "COLUMNS": "200"}


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a command left."""

    code: int
    stdout: str
    stderr: str


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what would lead a command elsewhere."""
    foreign = ("PREFECT_", "KVP_HOME", "KVP_TRACES", "KVP_MLFLOW_URI", "MLFLOW_", "OPENLINEAGE")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)} | QUIET | changes


def run_command(command: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> Finished:
    """Run a program of this environment to its end."""
    program = PROGRAMS / command[0]
    try:
        done = subprocess.run(
            [str(program), *command[1:]],
            env=env,
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace")
        pytest.fail(f"{' '.join(command)} took more than {timeout_s:.0f} s; it said: {last_line(said)}", pytrace=False)
    return Finished(code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def start_process(command: Sequence[str], *, log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a program of this environment in a session of its own, with its output in a file."""
    with log.open("wb") as stream:
        return subprocess.Popen(
            [str(PROGRAMS / command[0]), *command[1:]],
            env=env,
            cwd=CHECKOUT,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop_process(process: subprocess.Popen[bytes], *, timeout_s: float = 20.0) -> None:
    """End a process that `start_process` started, and whatever it left in its session."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=timeout_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def prefect_server(folder: Path, **variables: str) -> Iterator[str]:
    """Run a Prefect server with its state and log in a folder; gives its URL."""
    port = free_port()
    url, log = f"http://127.0.0.1:{port}/api", folder / "server.log"
    own = {"PREFECT_HOME": str(folder), "PREFECT_SERVER_UI_ENABLED": "false", "PREFECT_API_URL": url}
    command = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    process = start_process(command, log=log, env=environment(**own, **variables))
    try:
        wait_for_server(url, process, log=log, timeout_s=120)
        yield url
    finally:
        stop_process(process)


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for_server(url: str, process: subprocess.Popen[bytes], *, log: Path, timeout_s: float) -> None:
    """Wait until a Prefect server answers."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with _DIRECT.open(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"the Prefect server at {url} did not answer; it said: {tail(log)}", pytrace=False)


def tail(log: Path) -> str:
    """The end of a log in one line."""
    return " / ".join(log.read_text(errors="replace").split("\n")[-12:]).strip(" /") if log.exists() else "nothing"


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing"
