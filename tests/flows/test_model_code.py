"""A model folder with code of its own, at the command line: refused in one line, whoever answers on standard input."""

import json
import shutil
import subprocess

import pytest
from outcomes import assert_nothing_half_registered, assert_refused
from processes import CHECKOUT, PROGRAMS, Finished


@pytest.mark.parametrize("answers", ['yes y | "$@"', '"$@" <&-'], ids=["yes", "closed"])
def test_code_of_a_model_is_refused_and_not_run(server_environment, tiny_model_folder, tmp_path, answers):
    folder, marker, home = tmp_path / "model", tmp_path / "code was run", tmp_path / "home"
    shutil.copytree(tiny_model_folder("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    code = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.TheirConfig"}}
    (folder / "config.json").write_text(json.dumps(config | code))
    (folder / "theirs.py").write_text(f"open({str(marker)!r}, 'w').close()")
    command = [str(PROGRAMS / "kvp"), "run", "--preset", "smoke", "--model", str(folder), "--home", str(home)]
    done = subprocess.run(
        ["bash", "-c", answers, "bash", *command],
        env=server_environment,
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    finished = Finished(code=done.returncode, stdout=done.stdout, stderr=done.stderr)
    assert_refused(finished, f"model {folder}: config.json names code of its own (theirs.TheirConfig)", "never run")
    assert_nothing_half_registered(home)
    assert not marker.exists()
