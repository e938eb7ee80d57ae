"""Writes the pages of this folder from the code: commands, tables of the catalog, configuration (`make docs`)."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from flows.cli import app
from kvpolicy.config.settings import meanings
from kvpolicy.presets.pipeline_config import PipelineConfig, load_preset, preset_names
from storage.tables.schemas import TABLES
from storage.tables.views import VIEWS

FOLDER = Path(__file__).parent
_HEAD = "<!-- Written by `make docs` from the code: change it there. -->"


def pages() -> dict[str, str]:
    """Name of each page and its text."""
    parts = {"commands.md": _commands(), "tables.md": _tables(), "configuration.md": _configuration()}
    return {name: "\n".join([_HEAD, "", *lines]).rstrip() + "\n" for name, lines in parts.items()}


def _commands() -> Iterator[str]:
    yield "# Commands"
    yield ""
    yield "Every command has `--help`. Results go to standard output, all else to standard error; a wrong input is one"
    yield "line there and a non-zero exit."
    for name, command in _flat(typer.main.get_command(app)):
        arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
        usage = " ".join([f"kvp {name}", *(_usage(argument) for argument in arguments), "[OPTIONS]"])
        yield from ("", f"## kvp {name}", "", f"    {usage}", "", _one_line(command.help), "")
        options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
        yield from _table(
            ["option", "meaning", "default"],
            [[_option(option), _one_line(option.help), _default(option)] for option in options],
        )


def _flat(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _flat(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command.make_context(name, [], resilient_parsing=True).command


def _usage(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _option(option: Any) -> str:
    names = "/".join([*option.opts, *option.secondary_opts])
    return f"`{names} {option.metavar}`" if option.metavar else f"`{names}`"


def _default(option: Any) -> str:
    value = option.default
    return "" if value is None or value is False or callable(value) or value == [] else f"`{value}`"


def _tables() -> Iterator[str]:
    yield "# Tables and views of the catalog"
    yield ""
    yield "`kvp sql` asks them with DuckDB's SQL. Tables are append-only; times are in UTC."
    for name, schema in TABLES.items():
        yield from ("", f"## {name}", "", f"{_described(schema.metadata)}", "")
        yield from _table(
            ["column", "type", "meaning"], [[f"`{f.name}`", str(f.type), _described(f.metadata)] for f in schema]
        )
    yield from ("", "## Views", "")
    yield from _table(["view", "shows"], [[f"`{name}`", _one_line(view.description)] for name, view in VIEWS.items()])


def _described(metadata: dict[bytes, bytes]) -> str:
    return _one_line(metadata[b"description"].decode())


def _configuration() -> Iterator[str]:
    presets = {name: load_preset(name) for name in preset_names()}
    yield "# Configuration"
    yield ""
    yield "A run's configuration is a preset (`--preset`) with choices on top: `--set SECTION.FIELD=VALUE`, and options"
    yield "of their own for what is chosen often. A field that a preset does not name has the default."
    sections = [entry for entry in dataclasses.fields(PipelineConfig) if dataclasses.is_dataclass(entry.type)]
    for section in sections:
        yield from ("", f"## {section.name}", "", _one_line(section.type.__doc__), "")
        yield from _table(
            ["field", "meaning", *presets],
            list(_fields(section.type, [getattr(preset, section.name) for preset in presets.values()])),
        )


def _fields(kind: Any, values: list[Any], before: str = "") -> Iterator[list[str]]:
    for entry in dataclasses.fields(kind):
        of_presets = [getattr(value, entry.name) for value in values]
        if dataclasses.is_dataclass(of_presets[0]):
            yield from _fields(type(of_presets[0]), of_presets, f"{before}{entry.name}.")
        else:
            yield [f"`{before}{entry.name}`", meanings(kind)[entry.name], *(_value(value) for value in of_presets)]


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return "" if value is None else str(value)


def _table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"{FOLDER / name}\n")
