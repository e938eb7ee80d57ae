"""Options that several `kvp` commands take."""

from typing import Annotated

import typer

HomeOption = Annotated[
    str | None, typer.Option("--home", help="Folder of all state [default: KVP_HOME or ./.kvp]", metavar="DIR")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else")]


def is_whole_number(text: str) -> bool:
    """Whether `int` reads a text as a number without a sign; `isdigit` alone takes a superscript for one."""
    return text.isascii() and text.isdecimal()
