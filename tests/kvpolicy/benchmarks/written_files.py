"""Small files that look as the public ones do, one writer a source, and where the public ones lie if they are there."""

import gzip
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

PUBLIC_FILES = Path(__file__).resolve().parents[3].parent / "shared" / "data"

_THINGS = ("river", "lamp", "garden", "captain", "letter", "window", "bridge", "kettle", "harbour", "doctor", "orchard")
_ACTS = ("follows", "paints", "forgets", "carries", "answers", "repairs", "welcomes", "counts", "borrows", "measures")


def sentence(rng: Random) -> str:
    """A sentence that hardly ever comes twice."""
    first, second, third = rng.sample(_THINGS, 3)
    return f"The {first} number {rng.randrange(10**6)} {rng.choice(_ACTS)} the {second} before the {third} of the town."


def prose(rng: Random, num_sentences: int) -> str:
    return " ".join(sentence(rng) for _ in range(num_sentences))


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def message(
    name: str, text: str, role: str, *, lang: str = "en", rank: int | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "message_id": name,
        "parent_id": None,
        "text": text,
        "role": role,
        "lang": lang,
        "review_count": 3,
        "review_result": True,
        "deleted": False,
        "rank": rank,
        "synthetic": False,
        "replies": [],
        **more,
    }


def tree(root: dict[str, Any], *, state: str = "ready_for_export") -> dict[str, Any]:
    return {"message_tree_id": root["message_id"], "tree_state": state, "prompt": root}


def grown_tree(name: str, rng: Random, *, lang: str = "en", depth: int = 4) -> dict[str, Any]:
    """A tree with two ranked replies to every message of the user, and at most two to the better one of these."""

    def grow(own: str, role: str, rank: int | None, left: int) -> dict[str, Any]:
        made = message(own, prose(rng, rng.randint(1, 4)), role, lang=lang, rank=rank)
        other = "assistant" if role == "prompter" else "prompter"
        if left and (role == "prompter" or rank == 0):
            ranks = [1, 0] if role == "prompter" else [None] * rng.randint(1, 2)
            made["replies"] = [grow(f"{own}.{place}", other, way, left - 1) for place, way in enumerate(ranks)]
            for reply in made["replies"]:
                reply["parent_id"] = own
        return made

    return tree(grow(name, "prompter", None, depth - 1))


def messages(trees: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same trees with a message a row."""

    def walk(own: dict[str, Any], name: str) -> Iterable[dict[str, Any]]:
        yield {**{key: value for key, value in own.items() if key != "replies"}, "message_tree_id": name}
        for reply in own["replies"]:
            yield from walk(reply, name)

    return [
        {**row, "tree_state": grown["tree_state"]}
        for grown in trees
        for row in walk(grown["prompt"], grown["message_tree_id"])
    ]


def oasst2_trees(num_trees: int = 80) -> list[dict[str, Any]]:
    rng = Random(3)
    return [grown_tree(f"tree-{number}", rng, lang="de" if number % 4 == 0 else "en") for number in range(num_trees)]


def boolq_rows(num_rows: int = 160) -> list[dict[str, Any]]:
    rng = Random(4)
    return [
        {
            "question": f"is the {thing} number {n} old",
            "answer": rng.random() < 0.6,
            "passage": f"{thing} -- {prose(rng, 4)}",
        }
        for n in range(num_rows)
        for thing in [rng.choice(_THINGS)]
    ]


def arc_rows(num_rows: int = 160) -> list[dict[str, Any]]:
    rng = Random(5)
    rows = []
    for number in range(num_rows):
        labels = ["1", "2", "3", "4"] if number % 9 == 0 else ["A", "B", "C", "D"]
        texts = [f"{thing} {number}" for thing in rng.sample(_THINGS, 4)]
        rows.append(
            {
                "id": f"Mercury_{number}",
                "question": f"Which of these {sentence(rng).removeprefix('The ').removesuffix('.')}?",
                "choices": {"text": texts, "label": labels},
                "answerKey": rng.choice(labels),
            }
        )
    return rows


def mmlu_rows(num_rows: int = 160) -> list[dict[str, Any]]:
    rng = Random(6)
    return [
        {
            "question": f"Which statement is true of case {number}?",
            "subject": f"subject_{number % 4}",
            "choices": [sentence(rng) for _ in range(4)],
            "answer": rng.randrange(4),
        }
        for number in range(num_rows)
    ]


def hellaswag_rows(num_rows: int = 160) -> list[dict[str, Any]]:
    rng = Random(7)
    return [
        {
            "ind": number,
            "activity_label": rng.choice(["Making tea", "Painting"]),
            "ctx_a": "",
            "ctx_b": "",
            "ctx": f"[header] How to paint [title] {prose(rng, 2)} [step] Then the {rng.choice(_THINGS)}",
            "endings": [f"{rng.choice(_ACTS)} thing {number} way {way}." for way in range(4)],
            "source_id": f"activitynet~v_{number // 2}",
            "split": "val",
            "split_type": "indomain",
            "label": str(rng.randrange(4)),
        }
        for number in range(num_rows)
    ]


def passage_rows(task: str, num_rows: int = 40, num_paragraphs: int = 6) -> list[dict[str, Any]]:
    rng = Random(8)
    label, colon = ("Paragraph ", ": ") if task.endswith("en") else ("段落", "：")
    rows = []
    for number in range(num_rows):
        paragraphs = [prose(rng, 3) for _ in range(num_paragraphs)]
        gold = rng.randrange(num_paragraphs)
        rows.append(
            {
                "input": f"An abstract of: {paragraphs[gold].split('.')[0]}.",
                "context": "\n\n".join(
                    f"{label}{place}{colon}{text}" for place, text in enumerate(paragraphs, start=1)
                ),
                "answers": [f"{label}{gold + 1}"],
                "length": 400,
                "dataset": task,
                "language": task[-2:],
                "all_classes": None,
                "_id": f"{number:08x}",
            }
        )
    return rows


def gov_report_rows(num_rows: int = 40) -> list[dict[str, Any]]:
    rng = Random(9)
    return [
        {
            "input": "",
            "context": prose(rng, 8),
            "answers": [prose(rng, 2)],
            "length": 100,
            "dataset": "gov_report",
            "language": "en",
            "all_classes": None,
            "_id": f"{number:08x}",
        }
        for number in range(num_rows)
    ]


ROWS: Mapping[str, Callable[[], list[dict[str, Any]]]] = {
    "oasst2": oasst2_trees,
    "boolq": boolq_rows,
    "arc_challenge": arc_rows,
    "mmlu": mmlu_rows,
    "hellaswag": hellaswag_rows,
    "passage_retrieval_en": lambda: passage_rows("passage_retrieval_en"),
    "passage_retrieval_zh": lambda: passage_rows("passage_retrieval_zh"),
    "gov_report": gov_report_rows,
}
"""Rows of every source of rows, as the public files have them."""

PUBLIC: Mapping[str, tuple[str, ...]] = {
    "oasst2": ("oasst/trees_60.jsonl",),
    "boolq": ("boolq/boolq_dev_1500.jsonl",),
    "arc_challenge": ("arc/arc_challenge_600.jsonl",),
    "mmlu": ("mmlu/mmlu_dev_5_per_subject.jsonl", "mmlu/mmlu_test_570.jsonl"),
}
"""Real samples of some sources."""


def source_kinds(*sources: str) -> list[tuple[str, str]]:
    """Every source with `written`, and with `public` where real samples lie beside the repository."""
    public = [(source, "public") for source in sources if source in PUBLIC and PUBLIC_FILES.is_dir()]
    return [*((source, "written") for source in sources), *public]


def data_entries(source: str, kind: str, folder: Path) -> tuple[str, ...]:
    """The `source=path` entries of a source."""
    if kind == "public":
        return tuple(f"{source}={PUBLIC_FILES / name}" for name in PUBLIC[source])
    path = folder / f"{source}.jsonl"
    return (f"{source}={path if path.exists() else write_lines(path, ROWS[source]())}",)
