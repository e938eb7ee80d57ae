"""What surrounds a run: commit, interpreter, packages and hardware.

Captured once a process; nothing here imports what it describes.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from kvpolicy.digests import digest_json

_PROJECT = Path(__file__).resolve().parent.parent
_GIT_TIMEOUT_S = 10


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The surroundings of this process.

    Attributes:
        git_commit: commit of the project's own checkout; "" where the code is not a checkout.
        git_dirty: whether tracked files differ from that commit.
        python: version of the interpreter.
        platform: operating system and architecture.
        hardware: processor, cores, memory and GPUs in words.
        threads: of one computation: `OMP_NUM_THREADS`, or else the cores that this process may use. Sums in float32 are
            the same to the last bit only with the same number.
        packages: name -> version of every installed distribution.
    """

    git_commit: str
    git_dirty: bool
    python: str
    platform: str
    hardware: str
    threads: str
    packages: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the surroundings without the commit, which belongs to the code, as JSON values."""
        return {
            "python": self.python,
            "platform": self.platform,
            "hardware": self.hardware,
            "threads": self.threads,
            "packages": dict(self.packages),
        }

    @property
    def digest(self) -> str:
        """Digest of `to_json`."""
        return digest_json(self.to_json())


@functools.cache
def environment() -> Environment:
    """Return the surroundings of this process, captured at the first call."""
    commit, dirty = _git_state(_PROJECT)
    packages = {
        str(distribution.metadata["Name"]).lower(): distribution.version
        for distribution in importlib.metadata.distributions()
        if distribution.metadata["Name"]
    }
    return Environment(
        git_commit=commit,
        git_dirty=dirty,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        hardware=_hardware(),
        threads=os.environ.get("OMP_NUM_THREADS") or str(_usable_cores()),
        packages=dict(sorted(packages.items())),
    )


@functools.cache
def checkout_url() -> str:
    """Return where the project's own checkout comes from: its remote without credentials, or else its folder.

    Empty where the code is not a checkout.
    """
    if not _git_state(_PROJECT)[0]:
        return ""
    return public_url(_git(_PROJECT, "remote", "get-url", "origin").strip()) or _PROJECT.as_uri()


def public_url(remote: str) -> str:
    """Return a git remote as a URL that shows neither user nor password; empty if it is none, such as a folder."""
    if "://" not in remote:
        host, colon, path = remote.rpartition("@")[2].partition(":")  # user@host:path, as ssh has it
        return f"ssh://{host}/{path.lstrip('/')}" if colon and "/" not in host else ""
    parts = urlsplit(remote)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _git_state(project: Path) -> tuple[str, bool]:
    lines = _git(project, "rev-parse", "--show-toplevel", "HEAD").splitlines()
    # An installation inside someone else's checkout must not be given that checkout's commit.
    if len(lines) != 2 or Path(lines[0]).resolve() != project:
        return "", False
    return lines[1], bool(_git(project, "status", "--porcelain", "--untracked-files=no").strip())


def _git(project: Path, *arguments: str) -> str:
    command = ["git", "-C", str(project), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _hardware() -> str:
    memory_gib = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    processor = _field(Path("/proc/cpuinfo"), "model name") or platform.machine()
    parts = [f"{processor} x {os.cpu_count()}", f"{memory_gib} GiB"]
    gpus = Path("/proc/driver/nvidia/gpus")
    if gpus.is_dir():
        parts.extend(_field(gpu / "information", "Model") or "NVIDIA GPU" for gpu in sorted(gpus.iterdir()))
    return ", ".join(parts)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _field(path: Path, name: str) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name), "")
