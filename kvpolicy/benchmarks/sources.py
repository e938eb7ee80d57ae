"""The files that benchmarks are read from, as the user names them: `source=path`, and what each source is.

A path is a local file or `hub:owner/name@revision/path/in/repo`, a file of a data set on the hub. Such a file is
fetched once, into the cache of the models, and only because the user wrote so: nothing else here reaches out. A slash
within the revision is written `%2F`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from kvpolicy.digests import digest_file
from kvpolicy.errors import InputError, first_line

_LONGBENCH = "LongBench, in data.zip of the hub's data set THUDM/LongBench"

SOURCES: Mapping[str, str] = {
    "essays": "one or more plain text files of prose, such as a book of Project Gutenberg "
    "(RULER's own are Paul Graham's essays, from paulgraham.com/articles.html)",
    "squad": "the SQuAD v2.0 json file, from rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",
    "hotpotqa": "the HotpotQA dev distractor json file, "
    "from curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json",
    "oasst2": "OpenAssistant message trees, such as 2023-11-05_oasst2_ready.trees.jsonl.gz of the hub's data set "
    "OpenAssistant/oasst2",
    "boolq": "BoolQ rows (question, passage, answer), such as the files of the hub's data set google/boolq",
    "arc_challenge": "ARC-Challenge rows (question, choices, answerKey), such as the files in ARC-Challenge/ of the "
    "hub's data set allenai/ai2_arc",
    "mmlu": "MMLU rows (subject, question, choices, answer), such as the files in all/ of the hub's data set cais/mmlu",
    "hellaswag": "HellaSwag rows (ctx, endings, label), such as the files of the hub's data set Rowan/hellaswag",
    "passage_retrieval_en": f"passage_retrieval_en.jsonl of {_LONGBENCH}",
    "passage_retrieval_zh": f"passage_retrieval_zh.jsonl of {_LONGBENCH}",
    "gov_report": f"gov_report.jsonl of {_LONGBENCH}, or GovReport rows "
    "(report, summary), such as the files of the hub's data set ccdv/govreport-summarization",
}
"""What each source is and where it comes from."""

HUB = "hub:"
_HUB_FILE = re.compile(rf"{HUB}(?P<name>[^/@\s]+/[^/@\s]+)@(?P<revision>[^/\s]+)/(?P<file>\S.*)")


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A file of a source.

    Attributes:
        source: Which source it is of.
        name: As the user named it.
        path: Where it lies.
    """

    source: str
    name: str
    path: Path


@dataclass(frozen=True, kw_only=True)
class DataFiles:
    """The files of a run; make it with `find_files`.

    Attributes:
        files: All of them, in the order in which they were named.
    """

    files: tuple[DataFile, ...] = field(default=())

    def of(self, source: str) -> tuple[DataFile, ...]:
        """The files of a source; none where the user named none."""
        return tuple(file for file in self.files if file.source == source)

    def digests(self) -> dict[str, str]:
        """SHA-256 of every file, by its path as it was named."""
        return {file.name: digest_file(file.path) for file in self.files}


def find_files(data: Sequence[str], *, fetch: bool = True) -> DataFiles:
    """Find the files that are named.

    Args:
        data: `source=path` entries; a source may have several.
        fetch: Whether a file of the hub that is not in the cache may be fetched.

    Raises:
        InputError: An entry names no source, or its file is not there.
    """
    return DataFiles(files=tuple(_find(*parse_entry(entry), fetch=fetch) for entry in data))


def parse_entry(entry: str) -> tuple[str, str]:
    """Source and path of a `source=path` entry.

    Raises:
        InputError: It is not of this form, or there is no such source.
    """
    source, equals, path = entry.partition("=")
    if not equals or not path:
        raise InputError(f"data: {entry!r} is not of the form SOURCE=PATH, such as boolq=dev.jsonl")
    if source not in SOURCES:
        raise InputError(f"data: source {source!r} is unknown, expected one of {', '.join(SOURCES)}")
    if path.startswith(HUB) and not _HUB_FILE.fullmatch(path):
        raise InputError(f"data: {path!r} is not of the form {HUB}owner/name@revision/path/in/repo")
    return source, path


def absolute_entry(entry: str) -> str:
    """The same entry with a path that means the same in any working folder.

    Raises:
        InputError: If the entry is wrong, or its local file is not there.
    """
    source, path = parse_entry(entry)
    return entry if path.startswith(HUB) else f"{source}={_find(source, path, fetch=False).path.absolute()}"


def missing_source(task: str, source: str) -> InputError:
    """The error for a task whose source was not named: what is needed, and how to get it."""
    return InputError(f"task {task} needs {source}, which is not given: pass --data {source}=PATH, {SOURCES[source]}")


def _find(source: str, name: str, *, fetch: bool) -> DataFile:
    path = _hub_file(source, name, fetch=fetch) if name.startswith(HUB) else Path(name)
    with suppress(RuntimeError):  # a user who is not there: the path is none, then
        path = path.expanduser()
    if not path.is_file():
        problem = "is no file" if path.exists() else "does not exist"
        raise InputError(f"data: {source} file {name} {problem}: check --data; needed: {SOURCES[source]}")
    return DataFile(source=source, name=name, path=path)


def _hub_file(source: str, name: str, *, fetch: bool) -> Path:
    from huggingface_hub import hf_hub_download

    from kvpolicy.models.reference import default_cache

    match = _HUB_FILE.fullmatch(name)
    assert match is not None  # as `parse_entry` checked
    reason = "it is not in the cache"
    for only_local in (True, False) if fetch else (True,):  # what is here once stays as it is
        try:
            path = hf_hub_download(
                match["name"],
                match["file"],
                repo_type="dataset",
                revision=unquote(match["revision"]),
                cache_dir=default_cache() / "hub",
                etag_timeout=10,
                local_files_only=only_local,
            )
            return Path(path)
        except Exception as error:  # network, permission and naming errors have a dozen types
            reason = reason if only_local else first_line(error).rstrip(".")
    raise InputError(
        f"data: {name} cannot be fetched from the hub: {reason}; "
        f"check it, or download the file elsewhere and pass --data {source}=PATH"
    )
