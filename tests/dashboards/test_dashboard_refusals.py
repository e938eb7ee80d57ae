"""The dashboard of a home that is empty, half done or damaged, and what its server refuses."""

import re
from pathlib import Path

import pytest
from dashboard_client import client_of, page
from dashboard_home import make_dashboard_home, ranked_folder
from report_home import POLICIES, record

from dashboards.app.content import NAVIGATION
from dashboards.app.server import open_port
from storage.catalog.catalog import Catalog
from storage.errors import StorageError
from storage.home import Home


@pytest.mark.parametrize("name", NAVIGATION)
def test_an_empty_home_says_what_to_run(tmp_path: Path, name):
    text = page(client_of(Home.open(tmp_path / "home")), f"/{name}")
    assert re.search(r"This makes it: <code>kvp (run|train|evaluate)", text)


def test_a_home_that_is_half_done_says_how_to_go_on(tmp_path: Path):
    home = Home.open(tmp_path / "home")
    record(Catalog(home), "train", {}, {"policy": POLICIES[0]})
    text = page(client_of(home), "/curves")
    assert "policies and no evaluation yet" in text
    assert "<code>kvp evaluate</code>" in text


@pytest.mark.parametrize("table", ["runs", "curves"])
def test_a_damaged_table_is_a_message_on_the_page(tmp_path: Path, table):
    home = Home.open(tmp_path / "home")
    make_dashboard_home(home)
    for path in (home.catalog / f"{table}.lance" / "data").iterdir():
        path.write_bytes(b"nothing")
    text = page(client_of(home), "/curves", status=500)
    assert f"table {table} at " in text
    assert "Traceback" not in text


def test_damaged_rankings_are_a_message_on_the_page(tmp_path: Path):
    home = Home.open(tmp_path / "home")
    make_dashboard_home(home)
    (ranked_folder(home) / "rankings.parquet").write_bytes(b"nothing")
    text = page(client_of(home), "/tokens", status=500)
    assert "cannot read" in text
    assert "Traceback" not in text


def test_another_name_of_this_machine_and_other_verbs_are_refused(tmp_path: Path):
    client = client_of(Home.open(tmp_path / "home"))
    assert client.get("/curves", headers={"host": "evil.example"}).status_code == 400
    posted = client.post("/curves")
    assert (posted.status_code, set(posted.headers["allow"].split(", "))) == (405, {"GET", "HEAD"})
    assert "/curves is only read here: ask for it with GET, not POST." in posted.text
    assert "There is no page /nowhere here." in page(client, "/nowhere", status=404)


def test_a_port_in_use_is_one_line():
    said = r"port \d+ cannot be used \(Address already in use\): give the dashboard another --port"
    with open_port(0) as taken, pytest.raises(StorageError, match=said):
        open_port(taken.getsockname()[1])
