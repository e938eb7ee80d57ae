"""Everything that a person may get wrong: one line, a non-zero exit, no traceback, nothing half-registered."""

import json
import os
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from outcomes import assert_nothing_half_registered, assert_refused

from kvpolicy.digests import digest_file
from kvpolicy.models.model_folder import RECORD
from storage.home import FORMAT_VERSION

SMOKE = ("run", "--preset", "smoke")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def unsupported_model(tiny_model_folder, tmp_path: Path) -> Path:
    """A model with learned positions and no RoPE."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    folder = tmp_path / "gpt2-like"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder("llama"))
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=512, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def recorded_model(tiny_model_folder, tmp_path: Path) -> Path:
    """A model folder with the digests of its files beside them, as conversion leaves it."""
    folder = tmp_path / "recorded"
    shutil.copytree(tiny_model_folder("llama"), folder)
    record = {path.name: digest_file(path) for path in sorted(folder.iterdir())}
    (folder / RECORD).write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("run", "--preset", "huge"), ("'huge'", "smoke, demo, study, paper")),
        ((*SMOKE, "--methods", "kvp,snapvk"), ("'snapvk'", "snapkv")),
        ((*SMOKE, "--tasks", "niah_single_9"), ("niah_single_9", "niah_single_1")),
        ((*SMOKE, "--budgets", "19,64"), ("budget 19", "20 tokens that are always kept")),
        ((*SMOKE, "--budgets", "64,64"), ("budgets", "twice")),
        ((*SMOKE, "--budgets", "64,half"), ("64,half", "whole numbers")),
        ((*SMOKE, "--budgets", "-64"), ("-64",)),
        ((*SMOKE, "--tasks", "qa_1"), ("qa_1", "squad, which is not given", "SQuAD")),
        ((*SMOKE, "--tasks", "niah_single_2"), ("niah_single_2", "essays, which is not given")),
        ((*SMOKE, "--data", "book.txt"), ("'book.txt'", "SOURCE=PATH")),
        ((*SMOKE, "--data", "books=book.txt"), ("'books'", "essays")),
        ((*SMOKE, "--seed", "one"), ("--seed", "integer")),
        ((*SMOKE, "--frobnicate"), ("--frobnicate", "kvp --help")),
        (("frobnicate",), ("frobnicate", "kvp --help")),
        (("collect", "--preset", "huge"), ("'huge'",)),
    ],
    ids=lambda value: " ".join(value) if value and len(value[0]) > 2 else None,
)
def test_what_is_wrong_by_itself_is_refused_before_a_home_is_made(kvp_here, home, args, said):
    assert_refused(kvp_here(*args, home=home), *said)
    assert not home.exists()


def test_an_unknown_objective_is_refused(kvp, home):
    # As a process: here a shape check would speak first.
    assert_refused(kvp(*SMOKE, "--objective", "reinforce", home=home), "'reinforce'", "exact, rloo")
    assert not home.exists()


def test_no_choice_may_be_empty(kvp_here, home):
    for option in ("--tasks", "--methods", "--budgets"):
        assert_refused(kvp_here(*SMOKE, option, ",", home=home), option.removeprefix("--"))
    assert not home.exists()


def test_a_missing_text_is_named(kvp_here, home, tmp_path):
    finished = kvp_here(*SMOKE, "--tasks", "qa_1", "--data", f"squad={tmp_path / 'none.json'}", home=home)
    assert_refused(finished, "none.json")
    assert_nothing_half_registered(home)


@pytest.mark.parametrize("source", ["nobody/nothing/here", "./none", "none.gguf", ""])
def test_an_unknown_model_is_refused(kvp_here, home, source):
    assert_refused(kvp_here(*SMOKE, "--model", source, home=home), "model" if source != "none.gguf" else "GGUF")
    assert_nothing_half_registered(home)


def test_an_unknown_model_is_one_line_of_the_process_too(kvp, home):
    assert_refused(kvp(*SMOKE, "--model", "./none", home=home), "'./none'", "--model")
    assert_nothing_half_registered(home)


def test_an_unsupported_model_is_refused(kvp_here, home, unsupported_model):
    assert_refused(kvp_here(*SMOKE, "--model", str(unsupported_model), home=home), str(unsupported_model))
    assert_nothing_half_registered(home)


def test_a_damaged_model_is_refused(kvp_here, home, recorded_model):
    weights = recorded_model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert_refused(kvp_here(*SMOKE, "--model", str(recorded_model), home=home), "model.safetensors", "SHA-256")
    assert_nothing_half_registered(home)


@pytest.mark.parametrize("variables", [{"PIP_INDEX_URL": "http://127.0.0.1:9/simple"}, {"PIP_NO_INDEX": "1"}])
def test_without_a_network_the_embedded_model_is_missed_in_one_line(kvp_here, home, tmp_path, variables):
    offline = {
        "KVP_CACHE": str(tmp_path / "cache"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_RETRIES": "0",
        "PIP_NO_CACHE_DIR": "1",
    }
    finished = kvp_here(*SMOKE, home=home, **offline, **variables)
    assert_refused(finished, "the embedded model", "--model")
    assert_nothing_half_registered(home)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_budget_above_the_context_is_refused_before_work_begins(kvp_here, home):
    assert_refused(kvp_here(*SMOKE, "--budgets", "32,4000", home=home), "budget 4000", "above the context")
    assert_nothing_half_registered(home)


def test_training_needs_traces(kvp_here, home):
    assert_refused(kvp_here("train", "--preset", "smoke", home=home), "kvp collect --preset smoke")
    assert_nothing_half_registered(home)


def test_judging_needs_policies(kvp_here, home):
    assert_refused(kvp_here("evaluate", "--preset", "smoke", home=home), "kvp collect --preset smoke")
    assert_nothing_half_registered(home)


def test_a_home_that_is_a_file_is_refused(kvp_here, home):
    home.write_text("mine")
    for args in (SMOKE, ("sql", "SELECT 1")):
        assert_refused(kvp_here(*args, home=home), str(home), "--home")
    assert home.read_text() == "mine"


def test_a_home_of_another_version_is_refused(kvp_here, home):
    home.mkdir()
    (home / "home.json").write_text(json.dumps({"format_version": FORMAT_VERSION + 1}))
    for args in (SMOKE, ("sql", "SELECT 1"), ("lineage", "model-0123"), ("models",)):
        assert_refused(kvp_here(*args, home=home), f"format version {FORMAT_VERSION + 1}")
    assert [path.name for path in home.iterdir()] == ["home.json"]


def test_a_home_that_cannot_be_written_is_refused(kvp_here, home):
    assert_refused(kvp_here(*SMOKE, home=Path("/proc/kvpolicy-home")), "/proc/kvpolicy-home", "--home")
    if os.geteuid() != 0:  # nothing is read-only for root
        home.mkdir(mode=0o555)
        assert_refused(kvp_here(*SMOKE, home=home), str(home), "--home")


def test_a_missing_home_is_not_made_by_asking(kvp_here, home):
    for args in (("sql", "SELECT 1"), ("lineage", "model-0123"), ("models",)):
        assert_refused(kvp_here(*args, home=home), f"no home at {home}")
    assert not home.exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("sql", "SELECT nothing FROM curves"), "nothing"),
        (("sql", "SELECT * FROM kurves"), "kurves"),
        (("sql", "DROP TABLE curves"), "refused"),
        (("lineage", "model-ffffffffffff"), "model-ffffffffffff"),
        (("lineage", "abc"), "abc"),
        (("lineage", "model-0123", "--up", "--down"), "--up"),
        (("sql", "SELECT 1", "--format", "xml"), "xml"),
    ],
)
def test_a_wrong_question_is_refused(kvp_here, small_run, args, said):
    assert_refused(kvp_here(*args, home=small_run.home), said)


def test_a_prefect_server_that_is_not_there_is_one_line(kvp_here, home):
    said = kvp_here("run", "--preset", "smoke", home=home, PREFECT_API_URL="http://127.0.0.1:9/api")
    assert said.code == 1
    assert said.stderr.startswith(
        "kvp: no Prefect server answers at http://127.0.0.1:9/api, which PREFECT_API_URL names"
    )
    assert said.stderr.count("\n") == 1


def test_a_prefect_server_that_is_ill_is_one_line(kvp_here, home):
    class Ill(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(503)

        def log_message(self, *_):
            """Not to the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Ill) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        said = kvp_here("run", "--preset", "smoke", home=home, PREFECT_API_URL=url)
        server.shutdown()
    assert said.code == 1
    assert said.stderr.startswith(f"kvp: the Prefect server at {url}, which PREFECT_API_URL names, answers 503")
    assert said.stderr.count("\n") == 1


def test_a_query_file_and_a_moment_that_are_wrong_are_one_line(kvp_here, small_run, tmp_path):
    (tmp_path / "latin1.sql").write_bytes(b"SELECT '\xe9'")
    wrong = {
        ("--file", str(tmp_path / "none.sql")): "cannot be read",
        ("--file", str(tmp_path / "latin1.sql")): "cannot be read",
        ("SELECT 1", "--file", str(tmp_path / "latin1.sql")): "give one query, or --file with one",
        (): "give one query, or --file with one",
        ("SELECT 1", "--at", "yesterday"): "expected a version (a number) or a time",
        ("SELECT 1", "--at", "99999"): "no version 99999 of the catalog",
    }
    for arguments, message in wrong.items():
        said = kvp_here("sql", *arguments, home=small_run.home)
        assert said.code != 0
        assert message in said.stderr
        assert (said.stderr.count("\n"), said.stdout) == (1, "")


def test_a_damaged_policy_and_damaged_prompts_are_made_again(kvp_here, small_run, tmp_path):
    home = shutil.copytree(small_run.home, tmp_path / "home")
    for path in [next(home.glob("policies/policy_set-*/*.safetensors")), *home.glob("prompts/*.parquet")]:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    again = kvp_here("run", *small_run.options, "--json", home=home)
    assert again.code == 0, again.stderr
    document = json.loads(again.stdout)
    assert document["policy_set"]["id"] == small_run.document["policy_set"]["id"]
    assert not document["stages"]["train"]["skipped"]
    assert digest_file(Path(document["policy_set"]["path"]) / "policy.safetensors") == digest_file(
        Path(small_run.document["policy_set"]["path"]) / "policy.safetensors"
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("sql", "SELECT '[/bold] [red]x' AS \"[/b]\""), "[/bold] [red]x"),
        (("sql", "SELECT 'nan'::DOUBLE AS x", "--format", "json"), '[{"x": null}]'),
        (("sql", "SELECT 1 AS a, 2 AS a", "--format", "csv"), "a,a_1\n1,2"),
    ],
)
def test_any_text_and_number_is_printed_as_it_is(kvp_here, small_run, args, said):
    finished = kvp_here(*args, home=small_run.home)
    assert finished.code == 0, finished.stderr
    assert said in finished.stdout


def test_what_no_one_can_use_is_one_line(kvp_here, small_run, tmp_path):
    wrong = {
        ("sql", "SELECT 'infinity'::DATE", "--home", str(small_run.home)): "cast it to VARCHAR",
        ("run", "--budgets", "6²"): "expected whole numbers",
        ("run", "--data", f"squad={tmp_path / 'none.json'}"): "does not exist",
        ("sql", "SELECT 1", "--home", "/tmp/" + "x" * 300): "name too long",
        ("sql", "SELECT 1", "--home", "~nobody-of-that-name/x"): "choose another --home",
    }
    for arguments, message in wrong.items():
        said = kvp_here(*arguments)
        assert said.code != 0
        assert message.lower() in said.stderr.lower()
        assert (said.stderr.count("\n"), said.stdout) == (1, "")
