"""The commands that the pages show, as a reader would type them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("docs/how-to/*.md"))]
_BEGINS = re.compile(r"^    (?:[A-Z_]+=\S* )*(?:\.venv/bin/)?(kvp|prefect|mlflow|make|pip|createdb|export|ray|dask) ")


@dataclass(frozen=True, kw_only=True)
class DocumentedCommand:
    """A command of a page.

    Attributes:
        page: The page, from the root of the checkout.
        words: Its words, without variables, the folder of the program and comments.
        variables: What is set for it alone.
    """

    page: str
    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """The command in one line."""
        return shlex.join(self.words)


def documented_commands() -> list[DocumentedCommand]:
    """All commands of all pages, in their order; each once for a page."""
    return [command for page in PAGES for command in dict.fromkeys(_commands_of(page))]


def _commands_of(page: Path) -> Iterator[DocumentedCommand]:
    lines = iter(page.read_text(encoding="utf-8").splitlines())
    for line in lines:
        if not _BEGINS.match(line):
            continue
        text = line
        while (words := _words(text)) is None:  # a quote or a backslash goes on in the next line
            text += "\n" + next(lines)
        for part in _split(words):
            is_set = [word for word in part if re.fullmatch(r"[A-Z_]+=\S*", word)]
            variables = tuple(tuple(word.split("=", 1)) for word in is_set) if part[0] in is_set else ()
            rest = part[len(variables) :]
            yield DocumentedCommand(
                page=str(page.relative_to(ROOT)),
                words=(rest[0].removeprefix(".venv/bin/"), *rest[1:]),
                variables=variables,
            )


def _words(text: str) -> list[str] | None:
    if text.rstrip().endswith("\\"):
        return None
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return None


def _split(words: list[str]) -> Iterator[list[str]]:
    part: list[str] = []
    for word in words:
        if word in (";", "&&", "|"):
            yield part
            part = []
        elif word == ">":
            break
        else:
            part.append(word)
    yield part
