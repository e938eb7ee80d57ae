"""A proxy that is set for the network: nothing that is asked of this machine goes through it."""

import importlib.util
import os
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest
import requests
from outcomes import assert_refused
from processes import environment, run_command

from flows.runtime.process import reach_loopback_directly
from storage.traces.store import TraceStore
from tests.storage.trace_content import trace_sample, write

NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


class Proxy(ThreadingHTTPServer):
    """Refuses all requests, and remembers them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Refusal)
        self.asked: list[str] = []
        self.variables = dict.fromkeys(NAMES, f"http://127.0.0.1:{self.server_port}")


class _Refusal(BaseHTTPRequestHandler):
    server: Proxy

    def _refuse(self) -> None:
        self.server.asked.append(self.requestline)
        self.send_error(502)

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = do_PATCH = do_CONNECT = _refuse

    def log_message(self, *_: object) -> None:
        """Not to the terminal."""


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(timeout=30)


@pytest.fixture
def behind_proxy(proxy, monkeypatch) -> Proxy:
    """This process, with the proxy set and no exception from it."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")  # undone at the end, whatever is set meanwhile
    for name, value in proxy.variables.items():
        monkeypatch.setenv(name, value)
    return proxy


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_every_client_of_http_asks_this_machine_itself(behind_proxy, host):
    with pytest.raises(httpx.HTTPStatusError):
        httpx.get("http://somewhere.invalid").raise_for_status()
    assert len(behind_proxy.asked) == 1  # so the proxy counts
    reach_loopback_directly()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://{host}:{server.server_port}/"
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert answer.status == 200
        assert httpx.get(url).status_code == requests.get(url, timeout=30).status_code == 200
        server.shutdown()
    assert len(behind_proxy.asked) == 1


def test_object_stores_on_this_machine_are_reached_directly(s3_url, behind_proxy):
    reach_loopback_directly()
    store = TraceStore(s3_url)
    write(store, [trace_sample("s", 4)])
    assert store.verify() == []
    assert behind_proxy.asked == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"NO_PROXY": "localhost,127.0.0.1,::1", "no_proxy": "localhost,127.0.0.1,::1"}),
        (
            {"NO_PROXY": "a.example, 127.0.0.1"},
            dict.fromkeys(("NO_PROXY", "no_proxy"), "a.example,127.0.0.1,localhost,::1"),
        ),
        (
            {"NO_PROXY": "a", "no_proxy": "b"},
            {"NO_PROXY": "a,localhost,127.0.0.1,::1", "no_proxy": "b,localhost,127.0.0.1,::1"},
        ),
        ({"no_proxy": "*"}, {"no_proxy": "*"}),
    ],
)
def test_what_the_user_excepts_stays_excepted(monkeypatch, before, after):
    monkeypatch.setattr(os, "environ", dict(before))
    reach_loopback_directly()
    reach_loopback_directly()
    assert os.environ == after


def test_a_command_asks_the_server_that_it_is_given_directly(proxy, kvp, tmp_path):
    (tmp_path / "models").mkdir()
    words = ("watch", "--source", f"folder:{tmp_path / 'models'}", "--preset", "smoke")
    said = kvp(*words, home=tmp_path / "home", NO_PROXY="", no_proxy="", **proxy.variables)
    assert (said.code, said.stdout) == (0, "nothing new\n"), said.stderr
    assert proxy.asked == []


@pytest.mark.parametrize(
    ("name", "url"),
    [("ALL_PROXY", "socks5://127.0.0.1:9"), ("http_proxy", "gopher://a"), ("HTTPS_PROXY", "http://a:b")],
)
def test_a_proxy_that_no_client_takes_is_refused_before_anything_starts(kvp, tmp_path, name, url):
    if url.startswith("socks") and importlib.util.find_spec("socksio"):
        pytest.skip("this environment has what SOCKS takes")
    (tmp_path / "models").mkdir()
    words = ("watch", "--source", f"folder:{tmp_path / 'models'}", "--preset", "smoke")
    finished = kvp(*words, home=tmp_path / "home", **{name: url})
    assert_refused(finished, "the proxies that the environment names cannot be used")
    assert not (tmp_path / "home" / "prefect").exists()


@pytest.mark.slow
def test_a_command_and_services_reach_their_own_servers_directly(proxy, tmp_path):
    (tmp_path / "models").mkdir()
    home = ("--home", str(tmp_path / "home"))
    env = environment(NO_PROXY="", no_proxy="", **proxy.variables)
    for words in (("watch", "--source", f"folder:{tmp_path / 'models'}"), ("up",), ("status",), ("down",)):
        said = run_command(["kvp", *words, *home], env=env, timeout_s=240)
        assert said.code == 0, said.stderr
    assert proxy.asked == []


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Not to the terminal."""
