"""A cheap token counter, and outside texts: small faithful files always, the public files where they lie beside us."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import AutoTokenizer
from written_files import PUBLIC_FILES, data_entries
from written_ruler_texts import prose, write_hotpotqa, write_squad

from kvpolicy.benchmarks.registry import task_info
from kvpolicy.benchmarks.ruler import RulerTexts, read_texts
from kvpolicy.benchmarks.sample_request import SampleRequest
from kvpolicy.benchmarks.sources import find_files
from kvpolicy.text.sample import Sample

TEXT_KINDS = ["written", "public"] if PUBLIC_FILES.is_dir() else ["written"]

_TOKEN = re.compile(r"\w{1,4}|[^\w\s]")


@pytest.fixture(scope="session")
def count_tokens() -> Callable[[Sample], int]:
    """Pieces of up to four letters and every other sign, and thirty tokens of chat format."""
    return lambda sample: 30 + len(_TOKEN.findall(f"{sample.context}{sample.question} {sample.answer_prefix}"))


@pytest.fixture(scope="session", params=TEXT_KINDS)
def ruler_texts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RulerTexts:
    if request.param == "public":
        return read_texts(
            find_files(
                [
                    f"essays={PUBLIC_FILES / 'text' / 'alice.txt'}",
                    f"essays={PUBLIC_FILES / 'text' / 'pride_and_prejudice.txt'}",
                    f"squad={PUBLIC_FILES / 'squad' / 'dev-v2.0-cs224n.json'}",
                    f"hotpotqa={PUBLIC_FILES / 'hotpotqa' / 'hotpot_dev_distractor_100.json'}",
                ]
            )
        )
    folder = tmp_path_factory.mktemp("texts")
    essay = folder / "essay.txt"
    essay.write_text(prose(400, Random(0)))
    squad, hotpotqa = write_squad(folder / "squad.json"), write_hotpotqa(folder / "hotpotqa.json")
    return read_texts(find_files([f"essays={essay}", f"squad={squad}", f"hotpotqa={hotpotqa}"]))


@pytest.fixture(scope="session")
def squad_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squad(tmp_path_factory.mktemp("squad") / "squad.json")


@pytest.fixture(scope="session")
def hotpotqa_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hotpotqa(tmp_path_factory.mktemp("hotpotqa") / "hotpotqa.json")


@pytest.fixture(scope="session", params=TEXT_KINDS)
def foreign_multikey_3_prompt(request: pytest.FixtureRequest) -> str:
    """A niah_multikey_3 prompt, answer prefix included, that another generator wrote."""
    if request.param == "public":
        with (PUBLIC_FILES / "ruler" / "niah_multikey_3_4096_100.jsonl").open() as lines:
            return str(json.loads(next(lines))["input"])
    key, value, other = (f"{digit * 8}-aaaa-4aaa-8aaa-{digit * 12}" for digit in "123")
    return (
        "A special magic uuid is hidden within the following text. Make sure to memorize it. I will quiz you about "
        f"the uuid afterwards.\nOne of the special magic uuids for {other} is: {value}.\n"
        f"One of the special magic uuids for {key} is: {value}.\n"
        f"What is the special magic uuid for {key} mentioned in the provided text? "
        f"The special magic uuid for {key} mentioned in the provided text is"
    )


@pytest.fixture(scope="session")
def written_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("written")


@pytest.fixture(scope="session")
def byte_tokenizer(tiny_model_folder: Callable[..., Path]) -> Any:
    """A token a byte, and a chat template."""
    return AutoTokenizer.from_pretrained(tiny_model_folder("llama"))


@pytest.fixture(scope="session")
def ask(written_folder: Path, byte_tokenizer: Any) -> Callable[..., SampleRequest]:
    """Makes requests of a task over written or public files: `ask("boolq", "written", split="test")`."""

    def make(task: str, kind: str, *, data: tuple[str, ...] | None = None, **changes: Any) -> SampleRequest:
        info = task_info(task)
        given = data_entries(str(info.source), kind, written_folder) if data is None else data
        fields = {"split": "train", "seed": 0, "length_tokens": 6000, "tokenizer": byte_tokenizer, **changes}
        return SampleRequest(benchmark=info.benchmark, task=task, files=find_files(given), **fields)

    return make
