"""Samples of every kind come back from a prompt set as they went in."""

import dataclasses

from kvpolicy.text.sample import Sample
from storage.tables.parquet import write_rows
from tasks.framework.references import PromptsRef
from tasks.inputs.samples import read_samples

PLAIN = Sample(
    sample_id="ruler/vt/test/0/0/64",
    benchmark="ruler",
    task="vt",
    split="test",
    context="c",
    question="q",
    answer_prefix="",
    answer="a",
    references=("a", "b"),
    max_new_tokens=4,
)
CHOICE = dataclasses.replace(PLAIN, task="boolq", benchmark="boolq", options=(" no", " yes"), answer=" yes")
DIALOGUE = dataclasses.replace(
    PLAIN, task="dialogue", benchmark="oasst2", references=(), context_turns=("c", "ä"), answer_turns=("d", "e\n")
)


def test_samples_come_back_as_they_were(tmp_path):
    for number, samples in enumerate([[PLAIN], [PLAIN, CHOICE, DIALOGUE], [DIALOGUE, PLAIN]]):
        path = tmp_path / f"{number}.parquet"
        write_rows(path, [dataclasses.asdict(sample) for sample in samples])
        prompts = PromptsRef(artifact_id="p", split="test", seed=0, num_samples=len(samples), path=str(path))
        assert read_samples(prompts) == samples


def test_a_set_of_an_older_release_is_read(tmp_path):
    row = {
        name: value
        for name, value in dataclasses.asdict(PLAIN).items()
        if name not in ("options", "context_turns", "answer_turns")
    }
    write_rows(tmp_path / "old.parquet", [row])
    prompts = PromptsRef(artifact_id="p", split="test", seed=0, num_samples=1, path=str(tmp_path / "old.parquet"))
    assert read_samples(prompts) == [PLAIN]
