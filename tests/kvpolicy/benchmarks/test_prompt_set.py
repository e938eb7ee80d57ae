"""Sets of prompts: which samples they hold, that they fit, and what is refused before one is made."""

import re

import pytest
from written_files import data_entries

from kvpolicy.benchmarks.prompt_set import PromptConfig, generate_samples
from kvpolicy.benchmarks.registry import task_info, tasks_of
from kvpolicy.benchmarks.ruler import DEFAULT_TASKS
from kvpolicy.text.encoded_sample import count_all_tokens, count_prompt_tokens, encode

CONFIG = PromptConfig(tasks=("niah_single_1", "vt"), length_tokens=1200)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return tiny_model("llama").tokenizer


def _generate(tokenizer, config=CONFIG, *, split="train", num_samples_per_task=2, seed=0):
    made = generate_samples(
        config, split=split, num_samples_per_task=num_samples_per_task, seed=seed, tokenizer=tokenizer
    )
    return made.samples


def test_a_set_has_every_task_in_turn(tokenizer):
    samples = _generate(tokenizer, num_samples_per_task=3)
    assert [sample.task for sample in samples] == ["niah_single_1", "vt"] * 3
    assert len({sample.sample_id for sample in samples}) == 6
    assert {sample.split for sample in samples} == {"train"}


def test_prompts_and_answers_fit_in_the_length(tokenizer):
    for sample in _generate(tokenizer):
        num_tokens = count_prompt_tokens(sample, tokenizer)
        assert num_tokens + sample.max_new_tokens <= CONFIG.length_tokens
        encoded = encode(sample, tokenizer)
        assert len(encoded.context_ids) + len(encoded.question_ids) == num_tokens


def test_a_seed_gives_one_set_and_another_seed_another(tokenizer):
    first, again, other = (_generate(tokenizer, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert not {sample.context for sample in first} & {sample.context for sample in other}


def test_a_larger_set_begins_with_the_smaller(tokenizer):
    assert _generate(tokenizer, num_samples_per_task=3)[:2] == _generate(tokenizer, num_samples_per_task=1)


def test_splits_share_nothing(tokenizer):
    contexts = [{sample.context for sample in _generate(tokenizer, split=split)} for split in ("train", "test")]
    assert not contexts[0] & contexts[1]


def test_outside_texts_are_read_when_they_are_named(tokenizer, squad_file):
    config = PromptConfig(tasks=("qa_1",), length_tokens=2400, data=(f"squad={squad_file}",))
    (sample,) = _generate(tokenizer, config, num_samples_per_task=1)
    assert sample.task == "qa_1"
    assert list(config.find_files().digests()) == [str(squad_file)]


def test_the_defaults_need_nothing_from_outside():
    assert PromptConfig().tasks == tuple(DEFAULT_TASKS)
    assert all(info.source is None for info in tasks_of("ruler") if info.task in PromptConfig().tasks)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tasks": ("juggling",)}, ("'juggling'", "niah_single_1", "vt")),
        ({"tasks": ()}, ("tasks is (), expected at least one",)),
        ({"tasks": ("vt", "cwe", "vt")}, ("tasks", "vt", "twice")),
        ({"data": ("prose=a.txt",)}, ("'prose'", "essays", "hellaswag")),
        ({"data": ("a.txt",)}, ("'a.txt'", "SOURCE=PATH")),
        ({"data": ("boolq=hub:google/boolq/file.parquet",)}, ("hub:owner/name@revision/path/in/repo",)),
        ({"length_tokens": 0}, ("length_tokens is 0",)),
        ({"tasks": ("qa_1",)}, ("qa_1", "squad, which is not given", "--data squad=PATH", "SQuAD")),
        ({"tasks": ("qa_2",), "data": ("squad=squad.json",)}, ("qa_2", "hotpotqa, which is not given")),
        ({"tasks": ("vt", "niah_single_2")}, ("niah_single_2", "essays, which is not given")),
    ],
)
def test_a_wrong_configuration_is_refused_when_it_is_made(fails_in_one_line, changes, expected):
    message = fails_in_one_line(PromptConfig, **changes)
    assert all(part in message for part in expected)


def test_an_unknown_split_is_refused(tokenizer, fails_in_one_line):
    message = fails_in_one_line(_generate, tokenizer, split="exam")
    assert all(part in message for part in ("'exam'", "train", "validation", "test"))


def test_a_length_that_no_prompt_fits_is_refused_with_the_task(tokenizer, fails_in_one_line):
    message = fails_in_one_line(_generate, tokenizer, PromptConfig(tasks=("vt",), length_tokens=100))
    assert "vt" in message


def test_a_file_that_is_not_there_is_named(tokenizer, fails_in_one_line, tmp_path):
    missing = tmp_path / "prose.txt"
    config = PromptConfig(tasks=("niah_single_2",), data=(f"essays={missing}",))
    assert str(missing) in fails_in_one_line(_generate, tokenizer, config)


def test_tasks_of_several_benchmarks_mix(tokenizer, written_folder):
    data = tuple(entry for source in ("oasst2", "boolq") for entry in data_entries(source, "written", written_folder))
    config = PromptConfig(tasks=("niah_single_1", "dialogue", "boolq"), length_tokens=4000, data=data)
    assert config.benchmarks == ("ruler", "oasst2", "boolq")
    samples = _generate(tokenizer, config, num_samples_per_task=2)
    assert [sample.task for sample in samples] == ["niah_single_1", "dialogue", "boolq"] * 2
    assert samples[:3] == _generate(tokenizer, config, num_samples_per_task=1)
    for sample in samples:
        assert count_all_tokens(sample, tokenizer) <= 4000


def test_too_few_samples_are_refused_with_how_many_there_are(tokenizer, written_folder, fails_in_one_line):
    config = PromptConfig(
        tasks=("dialogue",), length_tokens=4000, data=data_entries("oasst2", "written", written_folder), language="de"
    )
    message = fails_in_one_line(_generate, tokenizer, config, split="test", num_samples_per_task=500)
    found = re.search(r"hold (\d+) samples of 4000 tokens for the test split, 500 were asked for", message)
    assert (
        found
        and len(_generate(tokenizer, config, split="test", num_samples_per_task=int(found[1]))) == int(found[1]) > 0
    )
    assert "conversation that is not in de" in message and "give more of oasst2" in message


def test_what_was_left_out_is_reported(tokenizer, written_folder):
    data = data_entries("oasst2", "written", written_folder)
    config = PromptConfig(tasks=("vt", "dialogue"), length_tokens=4000, data=data, language="en")
    made = generate_samples(config, split="test", num_samples_per_task=1, seed=0, tokenizer=tokenizer)
    assert made.reported["dialogue: conversation that is not in en"] > 0
    assert generate_samples(CONFIG, split="test", num_samples_per_task=1, seed=0, tokenizer=tokenizer).reported == {}


@pytest.mark.parametrize("task", ["dialogue", "boolq", "gov_report"])
def test_an_unknown_split_is_refused_by_every_benchmark(tokenizer, written_folder, fails_in_one_line, task):
    data = data_entries(str(task_info(task).source), "written", written_folder)
    config = PromptConfig(tasks=(task,), data=data)
    assert "'dev'" in fails_in_one_line(_generate, tokenizer, config, split="dev")


@pytest.mark.parametrize("task", ["dialogue", "boolq", "gov_report"])
def test_a_broken_line_is_named_through_the_set(tokenizer, tmp_path, fails_in_one_line, task):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"report": "a", "summary": "b"}\n{"report": \n' if task == "gov_report" else "{\n")
    config = PromptConfig(tasks=(task,), data=(f"{task_info(task).source}={path}",))
    assert f"{path} line {2 if task == 'gov_report' else 1}: not JSON" in fails_in_one_line(
        _generate, tokenizer, config
    )
