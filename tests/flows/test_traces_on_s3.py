"""The whole pipeline with its traces on a real S3 server, and everything else in the home."""

import json

import pytest

from storage.home import Home
from storage.traces.store import TraceStore
from tests.object_store import faulty_proxy


@pytest.mark.slow  # the pipeline three times; the store itself is tried on S3 in tests/storage
def test_a_home_whose_traces_lie_on_s3(kvp_here, small_run, s3_url, s3_endpoint, tmp_path):
    home, options = tmp_path / "home", ("run", *small_run.options, "--json")
    first = kvp_here(*options, "--traces", s3_url, "--compression", "zstd", home=home)
    assert first.code == 0, first.stderr
    document = json.loads(first.stdout)
    assert not (home / "traces").exists()
    assert kvp_here("traces", "verify", home=home).stdout == "5 samples are whole\n"

    # Where traces lie and how they are compressed changes no result.
    figures = [[{**row, "mlflow_run_id": ""} for row in run["curves"]] for run in (document, small_run.document)]
    assert figures[0] == figures[1]

    store = TraceStore(Home.open(home).traces)
    again = kvp_here(*options, home=home)
    assert all(stage["skipped"] for name, stage in json.loads(again.stdout)["stages"].items() if name != "prepare")
    store.discard([store.rows()[0].fragment_id])
    assert kvp_here(*options, home=home).code == 0
    assert kvp_here("traces", "verify", home=home).code == 0

    elsewhere = kvp_here(*options, "--traces", str(tmp_path / "elsewhere"), home=home)
    assert elsewhere.code == 1
    assert "keeps its traces at s3://" in elsewhere.stderr and elsewhere.stderr.count("\n") == 1
    with faulty_proxy(s3_endpoint) as proxy:
        proxy.denies = ("GET", "HEAD", "PUT")
        denied = kvp_here("traces", "verify", home=home, AWS_ENDPOINT_URL=proxy.endpoint)
    assert denied.code == 1
    assert "AWS_*" in denied.stderr and denied.stderr.count("\n") == 1
