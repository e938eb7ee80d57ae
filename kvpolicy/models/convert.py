"""Converting a GGUF file to a folder in Hugging Face's format, once, and telling later whether it was damaged."""

import json
import os
import shutil
import tempfile
from pathlib import Path

from kvpolicy.digests import digest_file
from kvpolicy.errors import InputError, first_line

RECORD = "sha256.json"


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Convert `gguf` to safetensors in bfloat16 at `folder`, which appears only when it is complete.

    The tokenizer is taken from the file as well. The SHA-256 of every file is recorded beside them. Two processes may
    convert the same file at once: the first to finish wins.

    Raises:
        InputError: If the file is not a GGUF file that transformers can read.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        try:
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            network = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True)
            )
        except Exception as error:  # the reader raises many types for a damaged or foreign file
            reason = first_line(error)
            raise InputError(f"GGUF file {gguf} cannot be converted: {reason}; check that it is complete") from error
        tokenizer.save_pretrained(scratch)
        network.to(torch.bfloat16).save_pretrained(scratch)
        record = {path.name: digest_file(path) for path in sorted(scratch.iterdir())}
        (scratch / RECORD).write_text(json.dumps(record, indent=1))
        try:
            os.rename(scratch, folder)  # noqa: PTH104  # Path.rename would be the same call; atomic on one file system
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_recorded_digests(folder: Path) -> None:
    """Compare a converted folder with the digests recorded beside it; a folder without a record passes.

    Raises:
        InputError: If a file is missing or was changed since the conversion.
    """
    record = folder / RECORD
    if not record.exists():
        return
    try:
        digests = dict(json.loads(record.read_text()))
        damaged = [folder / name for name, expected in digests.items() if not _has_digest(folder / name, expected)]
    except (ValueError, TypeError):
        digests, damaged = {}, [record]
    if damaged or not digests:
        raise InputError(
            f"model file {(damaged or [record])[0]} does not match its recorded SHA-256 (damaged or changed): "
            f"delete the folder {folder} and run again to make it anew"
        )


def _has_digest(path: Path, expected: str) -> bool:
    return path.is_file() and digest_file(path) == expected
