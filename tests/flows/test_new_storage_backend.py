"""The page on storage backends, followed on a copy of the tree: one file, and a pipeline keeps its traces there."""

import json
import re

import pytest
from outcomes import assert_refused, catalog
from processes import CHECKOUT
from sources import copied_sources

PAGE = (CHECKOUT / "docs" / "how-to" / "new-storage-backend.md").read_text()
(LINE,) = re.findall(r"```text\n(.+?)```", PAGE, flags=re.DOTALL)
TABLE = "OBJECT_STORES = {\n"


@pytest.mark.slow  # a pipeline and three commands, each a process
@pytest.mark.timeout(600)
def test_traces_lie_in_a_store_of_one_file(kvp, small_run, tmp_path):
    sources, home, share = copied_sources(tmp_path), tmp_path / "home", tmp_path / "share"
    share.mkdir()
    traces = ("--traces", share.as_uri())
    refused = kvp("collect", *small_run.options, *traces, home=home)
    assert_refused(refused, f"place '{share.as_uri()}': expected a folder or s3://bucket/prefix")

    places = sources / "storage" / "traces" / "places.py"
    text = places.read_text()
    assert text.count(TABLE) == 1
    places.write_text(text.replace(TABLE, TABLE + LINE))
    with_store = {"PYTHONPATH": str(sources)}
    finished = kvp("collect", *small_run.options, *traces, home=home, **with_store)
    assert finished.code == 0, finished.stderr
    finished = kvp("train", *small_run.options, "--json", home=home, **with_store)
    assert finished.code == 0, finished.stderr
    assert list(share.glob("fragments/*/zarr.json"))
    assert not (home / "traces").exists()
    uris = {row["uri"] for row in catalog(home).rows("artifacts", "kind = 'trace_fragment'")}
    assert uris and all(uri.startswith(share.as_uri()) for uri in uris)
    assert kvp("traces", "verify", home=home, **with_store).code == 0
    # The same traces as in a folder, so the same policies.
    of_folder = {row["digest"] for row in catalog(small_run.home).rows("artifacts", "kind = 'policy_set'")}
    assert {row["digest"] for row in catalog(home).rows("artifacts", "kind = 'policy_set'")} == of_folder
    assert json.loads(finished.stdout)
