"""The `kvp` command.

Results go to standard output, everything else to standard error. A wrong input is one line and a non-zero exit. Heavy
libraries are imported by the commands that need them, after the process is prepared.
"""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from flows.commands import (
    catalog,
    dashboard,
    generate,
    lineage,
    listing,
    promotion,
    repeat,
    report,
    services,
    traces,
    watch,
)
from flows.commands.pipeline import add_pipeline_commands
from flows.runtime.process import reach_loopback_directly
from flows.runtime.standard_streams import OutputLost, drop_output, prepare_streams, remark
from storage.errors import StorageError

_INTERRUPTED = 130

app = typer.Typer(
    name="kvp",
    help="Learn, evaluate and ship eviction policies for the KV cache of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvp {version('kvpolicy')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the release and exit")
    ] = False,
) -> None:
    """Options of the program itself, all of which end it."""


app.add_typer(traces.app, name="traces")
add_pipeline_commands(app)
app.command()(repeat.stale)
app.command()(repeat.rerun)
app.command()(generate.generate)
app.command()(promotion.promote)
app.command()(promotion.rollback)
app.command()(lineage.lineage)
app.command()(lineage.diff)
app.command()(lineage.openlineage)
app.command()(report.report)
app.command()(dashboard.dashboard)
app.command()(watch.watch)
app.command()(services.up)
app.command()(services.down)
app.command()(services.status)
app.command()(catalog.compact)
app.command()(catalog.sql)
app.command()(listing.models)
app.command()(listing.methods)
app.command()(listing.benchmarks)


def main() -> None:
    """Entry point: run a command, and turn what is wrong into one line."""
    from kvpolicy.errors import InputError, message_with_notes

    prepare_streams()
    reach_loopback_directly()
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()  # at the interpreter's end an error would be a traceback
    except (InputError, StorageError) as error:
        _fail(message_with_notes(error))
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except OutputLost as lost:
        drop_output()
        if lost.has_no_reader:
            sys.exit(0)  # there is nobody to tell
        _fail(f"standard output cannot be written ({lost}): send it elsewhere, and run the same command again")
    except Exception as error:
        if isinstance(error, UnicodeEncodeError) and not _are_text(sys.argv):
            _fail("an argument is not text in UTF-8: convert it, or rename what it names", code=2)
        if _is_lost_connection(error):  # what else needs a network says so itself
            _fail("the Prefect server no longer answers: start it, then run the same command again to go on")
        # typer carries a private copy of click, so its usage errors can only be told by what they offer.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the whole help
            remark(error.format_message())
            sys.exit(2)
        _fail(f"{error.format_message().rstrip('.')}; see `kvp --help`", code=2)
    if code == _INTERRUPTED:  # typer makes this of an interrupt, without a word
        _fail("interrupted; run the same command again to go on", code=_INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _is_lost_connection(error: BaseException | None) -> bool:
    httpx = sys.modules.get("httpx")  # Prefect's client has loaded it, or nobody has
    while httpx is not None and error is not None:
        # Prefect raises the second of the first, which does not travel with it from a worker.
        if isinstance(error, httpx.TransportError) or type(error).__name__ == "ConcurrencySlotAcquisitionError":
            return True
        error = error.__cause__
    return False


def _are_text(arguments: list[str]) -> bool:
    """Whether arguments are text throughout: of other bytes Python makes halves of surrogate pairs."""
    return not any("\ud800" <= sign <= "\udfff" for argument in arguments for sign in argument)


def _fail(message: str, *, code: int = 1) -> None:
    remark(f"kvp: {' '.join(message.split())}")
    sys.exit(code)


if __name__ == "__main__":
    main()
