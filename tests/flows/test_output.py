"""Standard streams as a shell may set them: other encodings, closed, a disk that is full, a reader that has gone."""

import json
import os
import subprocess

import pytest
from processes import PROGRAMS, environment

from storage.home import Home

TEXT = "é → 漢 😀"
QUERY = f"SELECT '{TEXT}' AS a"
MANY_ROWS = "SELECT 1 AS a FROM range(100000)"
ASCII = r"\xe9 \u2192 \u6f22 \U0001f600"
POSIX = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture
def home(tmp_path):
    return Home.open(tmp_path / "hömé →").path


def shell(line: str, *args: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash in which `kvp` is the command; the arguments are `$1` and so on."""
    env = {**environment(), **variables, "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    command = ["bash", "-o", "pipefail", "-c", line, "bash", *args]
    return subprocess.run(command, env=env, capture_output=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("encoding", "form", "printed"), [("ascii", "table", ASCII), ("cp1252", "csv", r"é \u2192 \u6f22 \U0001f600")]
)
def test_signs_beyond_the_encoding_are_written_as_their_numbers(home, encoding, form, printed):
    said = shell('kvp sql "$1" --format "$2" --home "$3"', QUERY, form, str(home), PYTHONIOENCODING=encoding)
    assert (said.returncode, said.stderr) == (0, b"")
    assert said.stdout.decode(encoding).split("\n")[1].strip() == printed


def test_json_is_the_same_document_in_every_encoding(home):
    said = shell('kvp sql "$1" --format json --home "$2"', QUERY, str(home), PYTHONIOENCODING="ascii")
    assert json.loads(said.stdout) == [{"a": TEXT}]


@pytest.mark.parametrize("variables", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "ascii:strict"}, POSIX])
def test_an_error_in_another_encoding_is_one_line(home, variables):
    said = shell('kvp models --home "$1/none"', str(home), **variables)
    assert (said.returncode, said.stdout) == (1, b"")
    assert said.stderr.startswith(b"kvp: ") and said.stderr.count(b"\n") == 1
    assert said.stderr.isascii()


def test_an_argument_that_is_no_text_is_one_line(server_environment, tmp_path):
    words = ("none\udce9", str(tmp_path / "home"))
    said = shell('kvp collect --preset smoke --model "$1" --home "$2"', *words, **server_environment)
    assert said.returncode != 0
    assert said.stderr.splitlines()[-1].startswith(b"kvp: ")
    assert b"Traceback" not in said.stderr


@pytest.mark.parametrize(("query", "unbuffered"), [("SELECT 1 AS a", ""), (MANY_ROWS, "1")])
def test_a_reader_that_has_gone_is_no_failure(home, query, unbuffered):
    line = 'kvp sql "$1" --format csv --home "$2" | head -c 1'
    said = shell(line, query, str(home), PYTHONUNBUFFERED=unbuffered)
    assert (said.returncode, said.stdout, said.stderr) == (0, b"a", b"")


@pytest.mark.parametrize(("query", "unbuffered"), [("SELECT 1 AS a", ""), (MANY_ROWS, "1")])
def test_output_that_cannot_be_written_is_one_line(home, query, unbuffered):
    line = 'kvp sql "$1" --format csv --home "$2" > /dev/full'
    said = shell(line, query, str(home), PYTHONUNBUFFERED=unbuffered)
    assert said.returncode == 1
    assert said.stderr == (
        b"kvp: standard output cannot be written (No space left on device): send it elsewhere, and run the same "
        b"command again\n"
    )


def test_streams_that_are_closed_are_nobody_s_files(home):
    said = shell('kvp sql "$1" --home "$2" <&- >&- 2>&-', QUERY, str(home))
    assert (said.returncode, said.stdout, said.stderr) == (0, b"", b"")
    assert [path.name for path in home.iterdir()] == ["home.json"]
    said = shell('kvp models --home "$1/none" 2>&-', str(home))
    assert (said.returncode, said.stdout) == (1, b"")


def test_an_answer_survives_an_encoding_that_cannot_hold_it(small_run, tmp_path):
    prompt = tmp_path / "fråge.txt"
    prompt.write_text("The pass key is 4821. " * 5)
    model = small_run.options[small_run.options.index("--model") + 1]
    options = "--budget 40 --max-new-tokens 4 --dtype float32 --compare"
    line = f'kvp generate --prompt-file "$1" --prompt-file "$1" --model "$2" --home "$3" {options}'
    said = shell(line, str(prompt), model, str(small_run.home), PYTHONIOENCODING="ascii")
    assert said.returncode == 0, said.stderr
    assert b"fr\\xe5ge.txt" in said.stdout
    assert b"Traceback" not in said.stderr
