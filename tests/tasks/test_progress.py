"""Progress: plain lines where there is no terminal."""

import logging
import re

from tasks.framework.progress import progress


def test_without_a_terminal_the_end_is_a_line(caplog):
    with caplog.at_level(logging.INFO, logger="kvpolicy"), progress("collect", 3, "samples") as advance:
        for note in ("", "", "the last"):
            advance(note)
    (line,) = caplog.messages
    assert re.fullmatch(r"collect: 3/3 samples, \d+ s, the last", line)


def test_work_that_fails_claims_no_end(caplog):
    try:
        with caplog.at_level(logging.INFO, logger="kvpolicy"), progress("train", 3, "steps") as advance:
            advance("")
            raise OSError
    except OSError:
        pass
    assert caplog.messages == []
