"""Preparing the process that runs a pipeline: where Prefect keeps its state, quiet libraries, and memory that is kept.

Called by entry points and by flows when they start, never at import.
"""

import ctypes
import logging
import os
import sys
from pathlib import Path

DEFAULT_HOME = ".kvp"
_EMBEDDED_SERVER_TIMEOUT_S = "120"
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_KEPT_BYTES = 1 << 30


def home_path(home: str | None) -> Path:
    """The home that was asked for: the argument, `KVP_HOME`, or `./.kvp`."""
    return Path(home or os.environ.get("KVP_HOME") or DEFAULT_HOME).expanduser().absolute()


def point_prefect_at(home: Path) -> None:
    """Keep Prefect's state under the home, unless a server is configured. Call it before Prefect is imported."""
    if "PREFECT_API_URL" in os.environ:
        return
    os.environ["PREFECT_HOME"] = str(home / "prefect")
    defaults = {
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": _EMBEDDED_SERVER_TIMEOUT_S,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "DO_NOT_TRACK": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def configure_libraries() -> None:
    """Set what libraries read from the environment when they load; call it before torch and transformers are imported."""
    defaults = {
        # OpenMP's waiting threads spin otherwise: on busy cores that makes small products ten times slower.
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def prepare_process() -> None:
    """Show our progress and not that of libraries, and keep freed memory for the next step."""
    configure_libraries()
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
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Let glibc reuse large blocks instead of returning them: a training step is twice as fast without page faults."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
