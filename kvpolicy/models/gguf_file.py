"""Whether a GGUF file is whole, as far as its own header and table of tensors tell."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from kvpolicy.errors import InputError, first_line

_MAGIC = b"GGUF"
_PART = re.compile(r"-\d{5}-of-\d{5}$")


def is_part(gguf: Path) -> bool:
    """Whether a file is named as one of several that make a model together, which are not read here."""
    return _PART.search(gguf.stem) is not None


def missing_content(gguf: Path) -> str:
    """What keeps a GGUF file from being whole, in a few words; empty where it is, or is no GGUF file at all.

    A file ends before its table of tensors does, or before the last byte that the table promises. Contents of tensors
    are not looked at.

    Raises:
        InputError: If what is there of the header is wrong, so that more of the file would not help.
        OSError: If the file cannot be read.
    """
    with gguf.open("rb") as stream:
        start = stream.read(len(_MAGIC))
    if not _MAGIC.startswith(start):
        return ""
    if len(start) < len(_MAGIC):
        return f"the file has {len(start)} bytes"
    try:
        _read(gguf)
    except EOFError as error:
        return f"the file ends too soon: {error}"
    except OSError:
        raise
    except Exception as error:  # the reader has no type of its own for a header that is wrong
        raise InputError(f"GGUF file {gguf} cannot be read: {first_line(error)}; make or copy it again") from error
    return ""


def _read(gguf: Path) -> None:
    """Read header and table, and map every tensor into memory."""
    from gguf import GGUFReader

    class Reader(GGUFReader):  # type: ignore[misc]  # of gguf, which publishes no types
        """Says where it would read beyond the end; gguf's own (0.19) fails there as it does in a wrong header."""

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            if end > len(self.data):
                raise EOFError(f"it has {len(self.data)} bytes of at least {end}")
            return super()._get(offset, dtype, count, override_order)

    Reader(gguf)
