"""Whether a GGUF file is whole, as far as its own header and table of tensors tell."""

import re
from pathlib import Path

from kvpolicy.errors import first_line

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
        OSError: If the file cannot be read.
    """
    with gguf.open("rb") as stream:
        start = stream.read(len(_MAGIC))
    if not _MAGIC.startswith(start):
        return ""
    if len(start) < len(_MAGIC):
        return f"the file has {len(start)} bytes"
    from gguf import GGUFReader

    try:
        GGUFReader(gguf)  # maps every tensor into memory, which fails where the file ends before it
    except OSError:
        raise
    except Exception as error:  # the reader has no type of its own for a file that ends too soon
        return f"not all of its header, table of tensors and tensors can be read: {first_line(error)}"
    return ""
