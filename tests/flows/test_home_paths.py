"""A home whose path means something in a URI: the pipeline with servers of its own, and the services of `kvp up`."""

import json
import os

import pytest
from processes import environment, run_command

from flows.runtime.process import point_prefect_at

NAME = "a?b #c%2Fd [é]"


@pytest.mark.slow
def test_the_pipeline_and_the_services_keep_to_a_home_of_any_name(small_model, tmp_path):
    above = tmp_path / "above"
    above.mkdir()
    home, env = above / NAME, environment()
    options = ("--preset", "smoke", "--tasks", "niah_single_1", "--methods", "kvp,knorm", "--model", str(small_model))
    said = []
    for words in (("run", *options, "--json"), ("up", "--json"), ("run", *options), ("status", "--json"), ("down",)):
        finished = run_command(["kvp", *words, "--home", str(home)], env=env, timeout_s=300)
        assert finished.code == 0, finished.stderr
        said.append(finished.stdout)
    document = json.loads(said[0])
    assert document["home"] == str(home)
    assert "Nothing had changed" in said[2]
    assert f"sql --home '{home}' " in said[2]
    assert {service["state"] for service in json.loads(said[3])["services"]} == {"running"}
    assert [path.name for path in above.iterdir()] == [NAME]
    assert (home / "prefect" / "prefect.db").stat().st_size > 0
    assert (home / "mlflow" / "mlflow.db").stat().st_size > 0


def test_prefect_s_database_is_named_only_where_prefect_would_name_another(tmp_path, monkeypatch):
    plain = {"HOME": str(tmp_path)}
    for home, named in (("plain", False), ("[é] #", False), ("a?b", True), ("a%2Fb", True)):
        monkeypatch.setattr(os, "environ", dict(plain))
        point_prefect_at(tmp_path / home)
        assert ("PREFECT_SERVER_DATABASE_CONNECTION_URL" in os.environ) == named
    monkeypatch.setattr(os, "environ", {**plain, "PREFECT_SERVER_DATABASE_HOST": "db"})
    point_prefect_at(tmp_path / "a?b")
    assert "PREFECT_SERVER_DATABASE_CONNECTION_URL" not in os.environ
