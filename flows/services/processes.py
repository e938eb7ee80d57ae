"""Processes that outlive the command that started them: how they are started, found again and ended.

A service has a record in the home's `services/` and, with all that it starts, a token of its own in its environment. A
process counts as the service's only if it has that token, so that one that was given the same number later is never
taken for it, nor ended. Linux only: it signals through file descriptors of processes, which psutil (7.2) does not.
"""

import dataclasses
import http.client
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from storage.errors import StorageError
from storage.home import Home
from storage.whole_files import write_whole

SERVER, MLFLOW, WORKER = "server", "mlflow", "worker"
_TOKEN = "KVP_SERVICE_TOKEN"
_STARTUP_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 15.0
_KILL_TIMEOUT_S = 60.0  # many at once, on busy cores
_POLL_S = 0.05
_LOADING_POLL_S = 0.001
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback, whatever proxy is set
_ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Refused)\w*: .+$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service that was started.

    Attributes:
        name: `server`, `mlflow` or `worker`.
        url: Where people reach it; empty for the worker.
        pid: Its first process.
        started_at: When it was started, in UTC.
        log: File that holds its output.
        token: Mark in the environment of all its processes.
    """

    name: str
    url: str
    pid: int
    started_at: str
    log: str
    token: str

    @property
    def runs(self) -> bool:
        """Whether its first process runs."""
        return environment_of(self.pid).get(_TOKEN) == self.token

    def processes(self) -> list[int]:
        """All of its running processes, also those whose parent has ended."""
        return [pid for pid in psutil.pids() if environment_of(pid).get(_TOKEN) == self.token]


def folder(home: Home) -> Path:
    """Where the records and logs of a home's services lie."""
    return home.path / "services"


def recorded(home: Home, name: str) -> Service | None:
    """The service of that name that was started last, whether it runs or not; None if none was, or it was ended.

    A copy of a home has none: its files describe the services of the original.

    Raises:
        StorageError: If the record cannot be read.
    """
    path = _record(home, name)
    try:
        service = Service(**json.loads(path.read_text(encoding="utf-8")))
        return service if Path(service.log).parent == folder(home) else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise StorageError(
            f"{path} cannot be read ({error}): end the service by hand if it runs, and remove that file"
        ) from error


def is_running(home: Home, name: str) -> bool:
    """Whether a service of the home runs."""
    service = recorded(home, name)
    return service is not None and service.runs


def worker_name(home: Home, *, create: bool = False) -> str | None:
    """Name of the home's worker on the server, the same for the home's life; None if it never had one.

    Raises:
        StorageError: If it cannot be written.
    """
    path = folder(home) / "worker-name"
    try:
        if create and not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"kvp-{uuid.uuid4().hex[:12]}", encoding="utf-8")
        return path.read_text(encoding="utf-8") if path.exists() else None
    except OSError as error:
        raise StorageError(f"{path} cannot be used ({error.strerror}): check the home") from error


def start(home: Home, name: str, command: Sequence[str], *, url: str, env: Mapping[str, str]) -> Service:
    """Start a service in a session of its own, away from the terminal, and record it.

    Raises:
        StorageError: If it cannot be started or recorded; then it does not run.
    """
    token, log = uuid.uuid4().hex, folder(home) / f"{name}.log"
    # A background job of a shell ignores SIGINT, and its children would inherit that: a worker could not be stopped.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        log.parent.mkdir(exist_ok=True)
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command,
                env={**env, _TOKEN: token},
                cwd=home.path,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            # The environment reads as empty until the program is loaded, as if the process had ended.
            while process.poll() is None and environment_of(process.pid).get(_TOKEN) != token:
                time.sleep(_LOADING_POLL_S)
            process.returncode = 0  # Python would warn of a child left running, as this one is on purpose
    except OSError as error:
        raise StorageError(f"cannot start the {name}: {error}; check that {log.parent} can be written") from error
    now = datetime.now(UTC).isoformat(timespec="seconds")
    service = Service(name=name, url=url, pid=process.pid, started_at=now, log=str(log), token=token)
    try:
        write_whole(_record(home, name), (json.dumps(dataclasses.asdict(service)) + "\n").encode())
    except OSError as error:
        stop(home, service)
        raise StorageError(f"cannot note the {name} in {folder(home)}: {error}; check the home") from error
    return service


def stop(home: Home, service: Service) -> None:
    """End a service and everything that it started, by SIGTERM, then SIGKILL. Remove its record and keep its log.

    Raises:
        StorageError: If a process of it cannot be ended.
    """
    for number, timeout_s in ((signal.SIGTERM, _STOP_TIMEOUT_S), (signal.SIGKILL, _KILL_TIMEOUT_S)):
        _end(service, number, timeout_s)
    if left := service.processes():
        raise StorageError(f"the {service.name}'s processes {left} cannot be ended: look at them with `ps`")
    _record(home, service.name).unlink(missing_ok=True)


def wait_for(service: Service, url: str, *, timeout_s: float = _STARTUP_TIMEOUT_S) -> None:
    """Wait until a service answers.

    Args:
        service: The service.
        url: Address that answers with success once the service can be used.
        timeout_s: Longest wait, in seconds.

    Raises:
        StorageError: If the service ends before, or takes too long.
    """
    deadline = time.monotonic() + timeout_s
    while service.runs and time.monotonic() < deadline:
        if answers(url, timeout_s=_ANSWER_TIMEOUT_S):
            return
        time.sleep(_POLL_S)
    state = "does not answer" if service.runs else "died"
    raise StorageError(
        f"the {service.name} of `kvp up` {state} ({last_error(Path(service.log))}), {service.log} says more: "
        "`kvp down` and `kvp up` start it anew"
    )


def answers(url: str, *, timeout_s: float) -> bool:
    """Whether a server of this machine answers a request with success."""
    try:
        with _DIRECT.open(url, timeout=timeout_s):
            return True
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
    except (OSError, http.client.HTTPException):
        pass
    return False


def last_error(log: Path) -> str:
    """The last line of a log that names an error, or else the last that is not blank."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "it left no log"
    lines = _ERROR_LINE.findall(text) or [line for line in text.splitlines() if line.strip()] or ["it said nothing"]
    return lines[-1].strip()[:300]


def environment_of(pid: int) -> dict[str, str]:
    """The environment with which a process began; empty if the process has ended or is another user's.

    psutil (7.2) stops at the first empty entry, which a process that sets its title leaves in its environment.
    """
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    entries = (entry.partition("=") for entry in content.decode(errors="replace").split("\0"))
    return {name: value for name, separator, value in entries if separator}


def _signal(pid: int, token: str, number: signal.Signals) -> None:
    with suppress(OSError):  # gone meanwhile
        handle = os.pidfd_open(pid)  # from here on the number cannot come to mean another process
        try:
            if environment_of(pid).get(_TOKEN) == token:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def _end(service: Service, number: signal.Signals, timeout_s: float) -> None:
    """Signal each process of a service once, also those that it starts meanwhile, and wait until there are none."""
    deadline, signalled = time.monotonic() + timeout_s, set[int]()
    while (left := set(service.processes())) and time.monotonic() < deadline:
        for pid in left - signalled:
            _signal(pid, service.token, number)
        signalled |= left
        with suppress(OSError):  # it may be a child of this command, which must then take its end in
            os.waitpid(service.pid, os.WNOHANG)
        time.sleep(_POLL_S)


def _record(home: Home, name: str) -> Path:
    return folder(home) / f"{name}.json"
