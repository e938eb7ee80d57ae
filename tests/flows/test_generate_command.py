"""`kvp generate` with the policy set of a small run: every way to name it, both caches side by side, and bad input."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from documented import documented_commands
from outcomes import assert_refused, policy_of_home

from kvpolicy import compressed_generate, load_model, load_policy
from kvpolicy.names import CHAMPION
from storage.catalog.catalog import Catalog
from storage.home import Home
from storage.mlflow.tracking import POLICY_SET_TAG, Tracking
from tests.drawn_policy import draw_policy

BUDGET, NUM_NEW = 40, 6
OPTIONS = ("--budget", str(BUDGET), "--max-new-tokens", str(NUM_NEW), "--dtype", "float32")
LONG = "The pass key is 4821. Remember it, for somebody will ask. " * 5
SHORT = "What is it?"

DOCUMENTED = [command for command in documented_commands() if command.words[:2] == ("kvp", "generate")]


@pytest.fixture
def generate(kvp_here, small_run, tmp_path):
    """Runs `kvp generate` with a long and a short prompt: `generate("--policy", "champion")`."""
    files = []
    for name, text in (("long.txt", LONG), ("short.txt", SHORT)):
        (tmp_path / name).write_text(text)
        files += ["--prompt-file", str(tmp_path / name)]

    def run(*options, prompts=files, home=small_run.home, **variables):
        words = (*prompts, *OPTIONS, "--model", model_folder(small_run), *options)
        return kvp_here("generate", *words, home=home, **variables)

    return run


def model_folder(run) -> str:
    return run.options[run.options.index("--model") + 1]


def policy_folder(run) -> Path:
    home = Home.open(run.home)
    return Path(Catalog(home).artifact(policy_of_home(home.path)).uri)


def expected_answers(run, **options):
    model = load_model(model_folder(run), dtype="float32")
    policy = load_policy(policy_folder(run))
    settings = {"budget": BUDGET, "max_new_tokens": NUM_NEW, **options}
    return compressed_generate(model, policy, [LONG, SHORT], **settings)


def test_every_name_of_a_policy_set_gives_its_answers(generate, small_run):
    policy = policy_of_home(small_run.home)
    name = f"kvpolicy-tiny-llama-{small_run.document['model']['digest'][:8]}"
    expected = [answer.text for answer in expected_answers(small_run)]
    for reference in (
        policy_folder(small_run),
        policy,
        policy[:20],
        "champion",
        f"models:/{name}/1",
        f"models:/{name}@champion",
    ):
        said = generate("--policy", str(reference), "--json")
        assert said.code == 0, said.stderr
        document = json.loads(said.stdout)
        assert [answer["compacted"]["text"] for answer in document["answers"]] == expected
        assert [answer["full"] for answer in document["answers"]] == [None, None]
        assert document["model"]["digest"] == small_run.document["model"]["digest"]
        assert (document["policy"], document["budget"]) == (str(reference), BUDGET)


def test_another_machine_needs_the_folder_alone_or_the_registry_alone(generate, small_run, tmp_path):
    expected = [answer.text for answer in expected_answers(small_run)]

    def answers(policy, home):
        said = generate("--policy", policy, "--json", home=home)
        assert said.code == 0, said.stderr
        return [answer["compacted"]["text"] for answer in json.loads(said.stdout)["answers"]]

    shutil.copytree(policy_folder(small_run), tmp_path / "sent")
    assert answers(str(tmp_path / "sent"), tmp_path / "no home") == expected
    assert not (tmp_path / "no home").exists()

    moved = shutil.copytree(small_run.home, tmp_path / "moved")
    shutil.rmtree(moved / "policies")
    away = small_run.home.rename(small_run.home.with_name("away"))
    try:
        name = f"kvpolicy-tiny-llama-{small_run.document['model']['digest'][:8]}"
        assert answers(f"models:/{name}@champion", moved) == expected
    finally:
        away.rename(small_run.home)


def test_a_registry_that_machines_share_is_enough(generate, small_run, postgresql, tmp_path):
    uri = postgresql.make_database("registry")
    tracking = Tracking(Home.open(tmp_path / "here", mlflow=uri))
    tracking.prepare()
    run_id = tracking.start_parent(experiment="shared", name="training", tags={}, timestamp_ms=1)
    tags = {POLICY_SET_TAG: policy_of_home(small_run.home)}
    tracking.register_policy(name="shared", folder=policy_folder(small_run), run_id=run_id, tags=tags, description="")
    tracking.move_alias(CHAMPION, policy_of_home(small_run.home))
    said = generate("--policy", "models:/shared@champion", "--json", home=tmp_path / "there", KVP_MLFLOW_URI=uri)
    assert said.code == 0, said.stderr
    texts = [answer["compacted"]["text"] for answer in json.loads(said.stdout)["answers"]]
    assert texts == [answer.text for answer in expected_answers(small_run)]


def test_both_caches_side_by_side(generate, small_run):
    compacted, full = expected_answers(small_run), expected_answers(small_run, budget=None)
    document = json.loads(generate("--compare", "--json").stdout)
    for found, own, other in zip(document["answers"], compacted, full, strict=True):
        for side, answer in (("compacted", own), ("full", other)):
            assert found[side]["tokens_per_s"] > 0
            assert {**found[side], "tokens_per_s": None} == {
                "text": answer.text,
                "prompt_tokens": answer.num_prompt_tokens,
                "kept_tokens": answer.num_kept_tokens,
                "evicted_tokens": answer.num_evicted_tokens,
                "cache_bytes": answer.cache_bytes,
                "new_tokens": len(answer.token_ids),
                "tokens_per_s": None,
            }
    long = document["answers"][0]
    ratio = long["full"]["cache_bytes"] / long["compacted"]["cache_bytes"]
    assert ratio == long["full"]["prompt_tokens"] / BUDGET > 2

    said = generate("--compare")
    assert f"{long['full']['cache_bytes']:,}" in said.stdout and f"{long['compacted']['cache_bytes']:,}" in said.stdout
    assert f"{ratio:.2f}" in said.stdout
    assert "long.txt" in said.stdout and "budget 40" in said.stdout and "full cache" in said.stdout


def test_without_json_the_answers_are_all_that_is_on_standard_output(generate, small_run, tmp_path):
    long, short = expected_answers(small_run)
    said = generate("--policy", "champion")
    files = [str(tmp_path / name) for name in ("long.txt", "short.txt")]
    assert said.stdout == f"== {files[0]}\n{long.text}\n== {files[1]}\n{short.text}\n"
    told = said.stderr.splitlines()[-2:]
    assert told[0].startswith(f"{long.num_evicted_tokens} of {long.num_prompt_tokens} tokens were evicted")
    assert told[1] == f"nothing was evicted: the prompt has {short.num_prompt_tokens} tokens, the budget is {BUDGET}"
    alone = generate(prompts=("--prompt-file", files[0]))
    assert alone.stdout == f"{long.text}\n"


def test_a_prompt_without_a_chat_format_is_said_to_be_plain(generate, tiny_model_folder, tmp_path):
    folder = shutil.copytree(tiny_model_folder("llama"), tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    draw_policy(load_model(str(folder), dtype="float32")).save(tmp_path / "policy")
    options = ("--model", str(folder), "--policy", str(tmp_path / "policy"))
    note = "the model has no chat template"
    assert json.loads(generate(*options, "--json").stdout)["format_note"] == note
    said = generate(*options)
    assert said.code == 0, said.stderr
    assert f"generate: {note}" in said.stderr


def test_chunks_and_evictions_while_answering_reach_the_library(generate, small_run):
    options = {"chunk_tokens": 30, "evict_every_tokens": 2}
    expected = [answer.text for answer in expected_answers(small_run, **options)]
    document = json.loads(generate("--chunk-tokens", "30", "--evict-every", "2", "--json").stdout)
    assert [answer["compacted"]["text"] for answer in document["answers"]] == expected


@pytest.mark.parametrize("command", DOCUMENTED, ids=lambda command: f"{command.page} {' '.join(command.words)}"[:90])
def test_a_documented_command_answers(kvp_here, small_run, tmp_path, monkeypatch, command):
    # As a reader types it, with the small run's model and its policy set in the place of the reader's.
    monkeypatch.chdir(tmp_path)
    for name in ("README.md", "question.txt", "docs/examples/magic-number.txt", "docs/examples/magic-number-long.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(LONG)
    policy = policy_of_home(small_run.home)
    words = [policy if word == "policy_set-3f2a9c" else word for word in command.words[1:]]
    said = kvp_here(*words, "--model", model_folder(small_run), home=small_run.home)
    assert said.code == 0, said.stderr
    assert said.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--policy", "no/such/folder"), ("no/such/folder",)),
        (("--policy", "feedface"), ("feedface",)),
        (("--policy", "README.md"), ("'README.md' is no folder and no id", "champion")),
        (("--policy", "models:/nothing/1"), ("models:/nothing/1",)),
        (("--policy", "models:/nothing"), ("models:/nothing",)),
        (("--budget", "19"), ("budget: 19", "expected from 20")),
        (("--max-new-tokens", "0"), ("max_new_tokens is 0",)),
        (("--chunk-tokens", "0"), ("chunk_tokens is 0",)),
        (("--evict-every", "-1"), ("evict_every_tokens is -1",)),
        (("--model", "no/such/model/folder"), ("no/such/model/folder",)),
        (("--prompt-file", "/no/such/file"), ("prompt file /no/such/file", "No such file")),
    ],
)
def test_what_cannot_be_is_one_line(generate, options, words):
    assert_refused(generate(*options), *words)


def test_prompts_that_cannot_be_are_named(generate, tmp_path):
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "bytes.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "long.txt").write_text("word " * 2000)
    for name, words in (("blank.txt", "is empty"), ("bytes.bin", "no text in UTF-8"), ("", "cannot be read")):
        assert_refused(generate("--prompt-file", str(tmp_path / name)), str(tmp_path / name), words)
    assert_refused(generate(), "prompt 1 of 2", "1024 positions")
    assert_refused(generate("--prompt-file", "/dev/zero"), "prompt file /dev/zero has more than 67,108,864 bytes")


def test_standard_input_is_read_as_files_are(generate, tmp_path, monkeypatch):
    (tmp_path / "plain.txt").write_text("What is it?\nSay.")
    expected = generate(prompts=("--prompt-file", str(tmp_path / "plain.txt"))).stdout
    (tmp_path / "windows.txt").write_bytes(b"\xef\xbb\xbfWhat is it?\r\nSay.")
    assert generate(prompts=("--prompt-file", str(tmp_path / "windows.txt"))).stdout == expected

    def piped(content):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8", "surrogateescape"))
        return generate(prompts=("--prompt-file", "-"))

    assert piped(b"What is it?\nSay.").stdout == expected
    assert_refused(piped(b"caf\xe9"), "prompt file - is no text in UTF-8 (unexpected end of data at byte 3)")


def test_what_is_no_policy_set_is_named(generate, small_run):
    model = small_run.document["model"]["id"]
    assert_refused(generate("--policy", model), model, "is no policy set")


def test_a_model_without_a_champion_and_another_model_are_refused(generate, small_run, tiny_model_folder):
    other = ("--model", str(tiny_model_folder("llama")))
    assert_refused(generate(*other), "has no champion")
    policy = str(policy_folder(small_run))
    assert_refused(generate(*other, "--policy", policy), "policy set was trained for model")


def test_without_a_home_only_a_folder_will_do(generate, tmp_path):
    assert_refused(generate(home=tmp_path / "nothing"), "no home at")
