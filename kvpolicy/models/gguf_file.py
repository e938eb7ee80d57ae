"""Reading a GGUF file: its header, its table of tensors, and whether it is whole as far as these tell.

Not for what the header means: `gguf_config`, `gguf_tokenizer`; nor for the tensors' values: `gguf_weights`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from kvpolicy.errors import InputError, first_line

_MAGIC = b"GGUF"
_PART = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """A GGUF file that is whole.

    Attributes:
        path: Of the file.
        fields: The header's fields by name.
        tensors: The reader's entry for each tensor, by name.
    """

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        """What the header calls the architecture; empty if it does not."""
        return str(self.fields.get("general.architecture", ""))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first."""
        return tuple(int(length) for length in reversed(self.tensors[name].shape))

    def values(self, name: str) -> Float[np.ndarray, "*shape"]:
        """Values of a tensor in float32, unpacked from whatever the file stores.

        Raises:
            InputError: If the file stores it in a way that gguf does not unpack.
        """
        from gguf import dequantize

        tensor = self.tensors[name]
        try:
            unpacked = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise InputError(
                f"tensor {name} is stored as {tensor.tensor_type.name}, which cannot be unpacked"
            ) from error
        return np.array(unpacked, dtype=np.float32).reshape(self.shape(name))


class ArchitectureFields:
    """Fields of a header that belong to the architecture, each to be taken once."""

    def __init__(self, file: GgufFile) -> None:
        self._prefix = f"{file.architecture}."
        start = len(self._prefix)
        self._left = {name[start:]: value for name, value in file.fields.items() if name.startswith(self._prefix)}

    def take(self, name: str, default: Any = None) -> Any:
        """Take a field, or the default where the header has none; a list of equal numbers is one number."""
        value = self._left.pop(name, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            return value[0]
        if isinstance(value, list):
            raise InputError(f"its header has {self._prefix}{name} layer by layer, which is not supported")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """Take a whole number above zero, or the default where the header has none, or zero.

        Raises:
            InputError: If it is anything else, or there is none and no default.
        """
        count: int = self._positive(name, int, default)
        return count

    def number(self, name: str, default: float | None = None) -> float:
        """Take a number above zero, or the default where the header has none, or zero.

        Raises:
            InputError: If it is anything else, or there is none and no default.
        """
        number: float = self._positive(name, (int, float), default)
        return number

    def _positive(self, name: str, kind: Any, default: Any) -> Any:
        value = self.take(name) or 0
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 <= value < math.inf:
            raise InputError(f"its header has {self._prefix}{name} = {value!r}, which cannot be: copy or make it again")
        if not value and default is None:
            raise InputError(f"its header has no {self._prefix}{name}, or zero: copy or make it again")
        return value or default

    def require_taken(self) -> None:
        """Refuse what nothing was made of, other than zeros, which switch a field off.

        Raises:
            InputError: If there is any.
        """
        for name in sorted(self._left):
            if self._left[name] not in (0, [], ""):
                raise InputError(
                    f"its header has {self._prefix}{name} = {self._left[name]}, which would be dropped: "
                    "convert the model it was made from instead"
                )


def read_gguf(path: Path) -> GgufFile:
    """Read header and table of tensors.

    Raises:
        InputError: If it is no GGUF file, is not whole, or its header is wrong.
        OSError: If the file cannot be read.
    """
    with path.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise InputError(f"GGUF file {path} cannot be converted: it does not begin as one; check the copy")
    from gguf import GGUFEndian

    try:
        reader = _read(path)
    except EOFError as error:
        raise InputError(f"GGUF file {path} cannot be read: {error}; check that it is complete") from error
    try:
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except UnicodeDecodeError as error:
        raise InputError(
            f"GGUF file {path} cannot be converted: a text in its header is not UTF-8; make it again"
        ) from error
    if reader.endianess != GGUFEndian.LITTLE:
        raise InputError(
            f"GGUF file {path} cannot be converted: its bytes are in big-endian order; make it for this one"
        )
    _require_places(reader, path)
    return GgufFile(path=path, fields=fields, tensors={tensor.name: tensor for tensor in reader.tensors})


def _require_places(reader: Any, path: Path) -> None:
    """Refuse tensors that do not lie one behind the other, as the format has them: some would be read as others."""
    end = int(reader.data_offset)
    for tensor in reader.tensors:
        if int(tensor.data_offset) != end:
            raise InputError(
                f"GGUF file {path} cannot be converted: tensor {tensor.name} begins at byte {int(tensor.data_offset)}, "
                f"expected {end}; make or copy it again"
            )
        end += -(-int(tensor.n_bytes) // reader.alignment) * reader.alignment


def is_part(gguf: Path) -> bool:
    """Whether a file is named as one of several that make a model together, which are not read here."""
    return _PART.search(gguf.stem) is not None


def missing_content(gguf: Path) -> str:
    """Say in a few words why a GGUF file is not whole; empty where it is, or is not a GGUF file at all.

    A file ends before its table of tensors does, or before the last byte that the table promises. Contents of tensors
    are not looked at.

    Raises:
        InputError: If the present part of the header is wrong, so that more of the file would not help.
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
        return str(error)
    return ""


def _read(gguf: Path) -> Any:
    """Read header and table, and map every tensor into memory.

    Raises:
        EOFError: If the file ends before what they promise.
        InputError: If they are wrong.
        OSError: If the file cannot be read.
    """
    from gguf import GGUFReader

    class Reader(GGUFReader):  # type: ignore[misc]  # of gguf, which publishes no types
        """Says where it would read beyond the end; gguf's own (0.19) fails there as it does in a wrong header."""

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            if end > len(self.data):
                raise EOFError(f"the file ends too soon: it has {len(self.data)} bytes of at least {end}")
            return super()._get(offset, dtype, count, override_order)

    try:
        return Reader(gguf)
    except (EOFError, OSError):
        raise
    except Exception as error:  # the reader has no type of its own for a header that is wrong
        raise InputError(f"GGUF file {gguf} cannot be read: {first_line(error)}; make or copy it again") from error
