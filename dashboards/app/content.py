"""What a page consists of, before it is HTML: or what is there instead of it."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class Nothing(Exception):
    """There is nothing to show: what is missing, and the command that makes it."""

    def __init__(self, missing: str, remedy: str) -> None:
        super().__init__(missing)
        self.missing = missing
        self.remedy = remedy


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page.

    Attributes:
        template: name of its template, which places the rest.
        content: what the template is given.
        status: HTTP's.
    """

    template: str
    content: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200


def numbers_file(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows as the text of a CSV file."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return stream.getvalue()
