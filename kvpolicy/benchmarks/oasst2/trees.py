"""Conversations out of OpenAssistant's message trees (arXiv 2304.07327), as OASST2 publishes them.

Read are both published forms: a tree a row, whose messages nest their replies, and a message a row, which names its
parent. Of every tree the path of the best-ranked replies is taken: of several replies the one with the lowest rank,
then one with a rank, then the one that leads to the longest path, then the first. Messages of the user that are on no
path yet begin further conversations in the same way, so that no two share a message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpolicy.benchmarks.file_rows import Row, read_rows
from kvpolicy.benchmarks.sample_request import SampleRequest

_ROLES = ("prompter", "assistant")  # by the parity of their place in a path
READY = "ready_for_export"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A path through a message tree, of whole exchanges.

    Attributes:
        tree: Id of the tree.
        language: Code of its language.
        turns: Texts, the user's first, then in turn; an even number of them.
    """

    tree: str
    language: str
    turns: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Message:
    """A message with its replies, the best first."""

    text: str
    role: str
    language: str
    rank: int | None
    replies: tuple[_Message, ...]

    @property
    def depth(self) -> int:
        """Messages of the longest path from here."""
        return 1 + max((reply.depth for reply in self.replies), default=0)


def read_conversations(request: SampleRequest) -> list[Conversation]:
    """The conversations of all files that are named, in their order; what is left out is counted.

    Left out are trees that are not ready for export, paths without an exchange (a text of the user and an answer, none
    of them deleted or empty), paths in several languages, and those not in the language that is wanted.

    Raises:
        InputError: A row is broken.
    """
    by_tree: dict[str, list[Conversation]] = {}
    for tree, state, row, root in _trees(request):
        message = _read_message(row, root)
        paths = [path for path in _paths(message) if path] if message else []
        if state != READY:
            request.report("tree that is not ready for export")
        elif tree in by_tree:
            request.report("tree that came before")
        elif not paths:
            request.report("tree without an exchange")
        else:
            read = (_conversation(request, tree, path) for path in paths)
            by_tree[tree] = [conversation for conversation in read if conversation is not None]
    return [conversation for alike in by_tree.values() for conversation in alike]


def _conversation(request: SampleRequest, tree: str, path: Sequence[_Message]) -> Conversation | None:
    """A path as a conversation; None, and counted, if it is in several languages or not in the wanted one."""
    languages = {message.language for message in path}
    if len(languages) > 1:
        request.report("conversation in several languages")
    elif request.language and languages != {request.language}:
        request.report(f"conversation that is not in {request.language}")
    else:
        return Conversation(tree=tree, language=path[0].language, turns=tuple(message.text for message in path))
    return None


def _trees(request: SampleRequest) -> Iterator[tuple[str, str, Row, Mapping[str, Any]]]:
    """Id, state, a row for errors and the root message of every tree."""
    messages: dict[str, list[Row]] = defaultdict(list)
    for file in request.files.of("oasst2"):
        for row in read_rows(file):
            if isinstance(root := row.fields.get("prompt"), dict):
                yield row.text("message_tree_id"), row.text("tree_state"), row, root
            elif "message_id" in row.fields:
                messages[row.text("message_tree_id")].append(row)
            else:
                raise row.error("neither prompt nor message_id is there, expected a message tree or a message")
    for tree, rows in messages.items():
        yield tree, str(rows[0].fields.get("tree_state")), rows[0], _nested(rows)


def _nested(rows: Sequence[Row]) -> dict[str, Any]:
    """The root of the messages of one tree, with their replies nested."""
    nested: dict[str, dict[str, Any]] = {row.text("message_id"): {**row.fields, "replies": []} for row in rows}
    roots = []
    for row in rows:
        node, parent = nested[row.text("message_id")], row.fields.get("parent_id")
        if parent is None:
            roots.append(node)
        elif parent in nested:
            nested[parent]["replies"].append(node)
        else:
            raise row.error(f"its parent {parent!r} is not there")
    if len(roots) != 1:
        raise rows[0].error(f"its tree has {len(roots)} messages without a parent, expected one")
    return roots[0]


def _read_message(row: Row, message: Any, place: int = 0) -> _Message | None:
    """A message with those replies that can go on from it, the best first; None if it is none or cannot be used."""
    if not isinstance(message, dict):
        raise row.error(f"a message is {type(message).__name__}, expected an object")
    row_of_message = Row(source=row.source, place=row.place, fields=message)
    text, role, language = row_of_message.text("text").strip(), row_of_message.text("role"), row_of_message.text("lang")
    rank, replies = message.get("rank"), message.get("replies") or ()
    if role not in _ROLES or not isinstance(rank, int | float | None) or not isinstance(replies, list | tuple):
        raise row.error("role, rank or replies of a message are not as published")
    if role != _ROLES[place % 2] or not text or message.get("deleted"):
        return None
    read = (_read_message(row, reply, place + 1) for reply in replies)
    usable = [reply for reply in read if reply is not None]
    return _Message(
        text=text,
        role=role,
        language=language,
        rank=None if rank is None else int(rank),
        replies=tuple(sorted(usable, key=_worse)),
    )


def _worse(message: _Message) -> tuple[int | float, int]:
    return (float("inf") if message.rank is None else message.rank, -message.depth)


def _paths(root: _Message) -> Iterator[list[_Message]]:
    """The best path from a user's message, in whole exchanges, then those from the user's messages beside it."""
    path = [root]
    while path[-1].replies:
        path.append(path[-1].replies[0])
    yield path[: len(path) // 2 * 2]
    for message in path:
        for other in message.replies[1:]:
            for start in (other,) if other.role == _ROLES[0] else other.replies:
                yield from _paths(start)


def long_texts(turns: Iterable[str]) -> frozenset[str]:
    """The texts by which a conversation can be recognised; short ones ("You're welcome!") are common property."""
    return frozenset(text for text in turns if len(text.split()) >= MIN_TRACED_WORDS or len(text) >= MIN_TRACED_CHARS)


MIN_TRACED_WORDS = 8
MIN_TRACED_CHARS = 60  # for languages that are written without blanks
