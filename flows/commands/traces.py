"""The `kvp traces` commands: list, verify, clean and export the trace store of a home."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands.options import HomeOption, JsonOption, is_whole_number
from flows.runtime.process import existing_home
from flows.runtime.standard_streams import remark

if TYPE_CHECKING:
    from storage.traces.store import TraceStore

app = typer.Typer(help="Look after the trace store.", no_args_is_help=True)

CollectionOption = Annotated[
    str | None, typer.Option(help="First characters of a collection's key [default: the only one]")
]
_HOUR_S = 3600.0


@app.command(name="list")
def list_collections(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List the collections: samples, tokens and fragments of each."""
    from flows.display.printing import print_records

    collections = _store(home).collections().values()
    records = [{**vars(collection), "splits": ", ".join(collection.splits)} for collection in collections]
    print_records(records, as_json=as_json)


@app.command()
def show(collection: CollectionOption = None, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show the samples of a collection and the fragments that hold them."""
    from flows.display.printing import print_records

    names = ("sample_id", "split", "setting", "context_tokens", "fragment_id", "start", "sample_digest")
    rows = _store(home).collection(collection)
    print_records([{name: getattr(row, name) for name in names} for row in rows], as_json=as_json)


@app.command()
def verify(
    collection: CollectionOption = None,
    home: HomeOption = None,
    discard: Annotated[
        bool, typer.Option("--discard", help="Remove damaged fragments; collecting makes them again")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read every committed byte again; name what is damaged, and exit with 1 if anything is."""
    from flows.display.printing import print_records

    store = _store(home)
    key = None if collection is None else store.collection(collection)[0].collection
    problems = store.verify(key)
    if as_json:
        print_records([vars(problem) for problem in problems], as_json=True)
    else:
        print("\n".join(str(problem) for problem in problems) or f"{len(store.rows(key))} samples are whole")
    if problems and discard:
        store.discard(problem.fragment_id for problem in problems)
        remark("kvp: damaged fragments were discarded; run `kvp collect` or `kvp run` again")
    if problems:
        raise typer.Exit(1)


@app.command()
def gc(
    home: HomeOption = None,
    min_age_hours: Annotated[
        float, typer.Option(help="Leave what is younger: its writer may be about to commit it", min=0)
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Remove what writers that died have left."""
    removed = _store(home).gc(min_age_s=min_age_hours * _HOUR_S)
    print(json.dumps(removed) if as_json else f"{len(removed)} fragments removed")


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="File to write: .parquet or .safetensors", metavar="FILE")],
    heads: Annotated[str, typer.Option(help="Heads such as 0,7,12-14")] = "0",
    collection: CollectionOption = None,
    split: Annotated[str | None, typer.Option(help="Only samples of this split")] = None,
    home: HomeOption = None,
) -> None:
    """Write keys, values and importance of chosen heads to one file for other programs."""
    from storage.traces.export import EXPORT_FORMATS, export_traces

    file_format = out.suffix.removeprefix(".")
    if file_format not in EXPORT_FORMATS:
        endings = " or ".join(f".{name}" for name in EXPORT_FORMATS)
        raise typer.BadParameter(f"--out is {str(out)!r}, expected a name that ends with {endings}")
    store = _store(home)
    rows = [row for row in store.collection(collection) if split is None or row.split == split]
    num_bytes = export_traces(store, rows, _head_numbers(heads), out, file_format=file_format)
    print(f"{len(rows)} samples, {num_bytes / 2**20:.1f} MiB: {out}")


def _store(home: str | None) -> "TraceStore":
    from storage.traces.store import TraceStore

    return TraceStore(existing_home(home).traces)


def _head_numbers(text: str) -> list[int]:
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not is_whole_number(first) or (dash and not is_whole_number(last)):
            raise typer.BadParameter(f"--heads is {text!r}, expected numbers and ranges such as 0,7,12-14")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
