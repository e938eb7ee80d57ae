"""The command's standard streams: no sign that they cannot hold and no lost reader makes a traceback of an answer.

Called by the entry point alone; the library leaves streams as they are.
"""

import codecs
import io
import os
import sys
from contextlib import suppress
from typing import Any

_UNENCODABLE = "backslashreplace"
_OUTPUT = 1  # number of the file
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # by the number of their file


class OutputLost(Exception):
    """Standard output cannot be written; no `OSError`, of which typer would make an exit without a word."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause.strerror)
        self.has_no_reader = isinstance(cause, BrokenPipeError)


class _Output(io.FileIO):
    """The file behind standard output, whose errors are told from those of all other files."""

    def write(self, content: Any) -> int | None:
        try:
            return super().write(content)
        except OSError as error:
            raise OutputLost(error) from error


def prepare_streams() -> None:
    r"""Open the streams that are closed, and let them write any text: a sign beyond the encoding becomes ``\u2192``."""
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            # The next file that is opened would get the number, and with it what is meant for the stream.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  # a number, for good
    if type(sys.stdout) is io.TextIOWrapper:  # neither a test's nor another program's
        sys.stdout = _output_like(sys.stdout)
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors=_UNENCODABLE)
    if codecs.lookup(sys.stdout.encoding).name != "utf-8":  # for what is started from here, such as servers
        os.environ["PYTHONIOENCODING"] = f"{sys.stdout.encoding}:{_UNENCODABLE}"


def _output_like(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    raw = _Output(_OUTPUT, "wb", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # type: ignore[arg-type]  # as Python itself does
        encoding=stream.encoding,
        errors=_UNENCODABLE,
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def drop_output() -> None:
    """Drop what standard output could not take, so that the interpreter does not try it once more at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _OUTPUT)
    os.close(nowhere)


def remark(text: str) -> None:
    """Print a line to standard error; that nobody reads it is no reason to fail."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
