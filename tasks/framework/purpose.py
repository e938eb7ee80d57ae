"""Why tasks run: the request that they serve, and the run that they repeat.

Kept in Prefect's tags: they follow a task into threads, processes and other machines, and its UI shows them. Not an
argument of tasks, because nothing that they compute may depend on it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prefect.context import TagsContext

_REQUEST, _REPEATS = "kvp.request:", "kvp.repeats:"


@dataclass(frozen=True, kw_only=True)
class Purpose:
    """What tasks run for.

    Attributes:
        request_id: Artifact of the request; empty where nobody recorded one.
        repeats: Run that is being repeated: earlier results are not used then; empty for an ordinary run.
    """

    request_id: str = ""
    repeats: str = ""


@contextmanager
def acting_for(purpose: Purpose) -> Iterator[None]:
    """Let all tasks that the block calls run for a purpose, in place of the one around it."""
    others = {tag for tag in TagsContext.get().current_tags if not tag.startswith((_REQUEST, _REPEATS))}
    tags_of_purpose = {
        mark + value for mark, value in ((_REQUEST, purpose.request_id), (_REPEATS, purpose.repeats)) if value
    }
    with TagsContext(current_tags=others | tags_of_purpose):
        yield


def current_purpose() -> Purpose:
    """What the running task, or the code around it, runs for."""
    tags = TagsContext.get().current_tags

    def marked(mark: str) -> str:
        return next((tag.removeprefix(mark) for tag in tags if tag.startswith(mark)), "")

    return Purpose(request_id=marked(_REQUEST), repeats=marked(_REPEATS))
