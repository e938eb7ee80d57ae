"""Rows of public data files: JSON lines (also gzipped), a JSON list or Parquet, each row with its place for errors."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvpolicy.benchmarks.sources import SOURCES, DataFile
from kvpolicy.errors import InputError, first_line

FORMATS = (".jsonl", ".jsonl.gz", ".json", ".parquet")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a file.

    Attributes:
        source: Source of the file.
        place: File and line, for people.
        fields: What it holds.
    """

    source: str
    place: str
    fields: Mapping[str, Any]

    def text(self, name: str) -> str:
        """A field that holds text.

        Raises:
            InputError: There is none of that name, or it holds something else.
        """
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise self.error(f"{name} is {_shown(value)}, expected text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A field that holds a list of texts.

        Raises:
            InputError: There is none of that name, or it holds something else.
        """
        value = self.fields.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(f"{name} is {_shown(value)}, expected a list of texts")
        return tuple(value)

    def error(self, problem: str) -> InputError:
        """The error that names this row and what its source should be."""
        return InputError(f"{self.place}: {problem}; needed: {SOURCES[self.source]}")


def read_rows(file: DataFile) -> Iterator[Row]:
    """Read the rows of a file, in their order.

    Raises:
        InputError: It cannot be read, is of no known format, or a row is broken, which is named.
    """
    name = file.path.name.lower()
    kind = next((suffix for suffix in FORMATS if name.endswith(suffix)), None)
    if kind is None:
        raise InputError(
            f"{file.name} is of no known format, expected one of {', '.join(FORMATS)}; needed: {SOURCES[file.source]}"
        )
    read = {".json": _json_list, ".parquet": _parquet_rows}.get(kind, _json_lines)
    for label, value in read(file):
        row = Row(source=file.source, place=f"{file.name} {label}", fields=value if isinstance(value, dict) else {})
        if not isinstance(value, dict):
            raise row.error(f"{_shown(value)} is no row, expected an object with named fields")
        yield row


def read_text(file: DataFile) -> str:
    """The whole text of a file.

    Raises:
        InputError: It cannot be read, or is not UTF-8.
    """
    try:
        return file.path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise _unreadable(file, error.strerror or first_line(error)) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file.name} is not UTF-8 text (byte {error.start}); {file.source} must be {SOURCES[file.source]}"
        ) from error


def parse_json(text: str) -> Any:
    """What JSON holds.

    Raises:
        ValueError: It is no JSON, is nested too deeply, or holds half a character (a lone surrogate), which is no text.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if "\\ud" in text.lower():  # only an escape can hold one
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _json_lines(file: DataFile) -> Iterator[tuple[str, Any]]:
    opened = gzip.open if file.path.name.lower().endswith(".gz") else open
    number = 0
    try:
        with opened(file.path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"line {number}", parse_json(line.decode("utf-8-sig"))
    except ValueError as error:
        raise _broken(file, f"line {number}", error) from error
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(file, f"{first_line(error)} after line {number}") from error


def _json_list(file: DataFile) -> Iterator[tuple[str, Any]]:
    text = read_text(file)
    try:
        content = parse_json(text)
    except json.JSONDecodeError as error:
        raise _broken(file, f"line {error.lineno}", error) from error
    except ValueError as error:
        raise _unreadable(file, first_line(error)) from error
    if not isinstance(content, list):
        raise InputError(f"{file.name} holds {_shown(content)}, expected a list of rows")
    for number, value in enumerate(content, start=1):
        yield f"entry {number}", value


def _parquet_rows(file: DataFile) -> Iterator[tuple[str, Any]]:
    import pandas as pd

    try:
        records = pd.read_parquet(file.path).to_dict("records")
    except (OSError, ValueError) as error:  # pyarrow's errors are among these
        raise _unreadable(file, first_line(error)) from error
    for number, record in enumerate(records, start=1):
        yield f"row {number}", _plain(record)


def _plain(value: Any) -> Any:
    """Python's own types for those of numpy; what is missing is None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _plain(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_plain(member) for member in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _broken(file: DataFile, label: str, error: Exception) -> InputError:
    return InputError(f"{file.name} {label}: not JSON ({first_line(error)}); needed: {SOURCES[file.source]}")


def _unreadable(file: DataFile, reason: str) -> InputError:
    return InputError(f"cannot read {file.name}: {reason}; {file.source} must be {SOURCES[file.source]}")


def _shown(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
