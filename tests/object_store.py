"""A real S3 server on loopback, and a proxy before it that fails as object stores do now and then."""

from __future__ import annotations

import http.client
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_STARTS_WITHIN_S = 60
_BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
_NOT_FORWARDED = {"host", "connection", "transfer-encoding", "content-length"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def credentials(endpoint: str) -> dict[str, str]:
    """The environment of a client."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "the-secret-of-the-tests",
        "AWS_REGION": "us-east-1",
    }


@contextmanager
def s3_server(log: Path) -> Iterator[str]:
    """Run an S3 server as a process of its own; gives its endpoint."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + _STARTS_WITHIN_S
        while not _answers(f"{endpoint}/moto-api/"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the S3 server did not start: {log.read_text()[-500:]}")
            time.sleep(0.1)
        yield endpoint
    finally:
        process.terminate()
        process.wait(timeout=30)


def make_bucket(endpoint: str, name: str) -> None:
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT")).close()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=1).close()
    except OSError:
        return False
    return True


class FaultyProxy(ThreadingHTTPServer):
    """Hands requests on to an S3 server, but answers some of them itself.

    Attributes:
        busy_share: share of requests that get 503.
        denies: methods that get 403.
        denies_below: part of a path: others are let through.
        refused: how many requests it has refused.
    """

    daemon_threads = True

    def __init__(self, endpoint: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = endpoint.removeprefix("http://")
        self.busy_share = 0.0
        self.denies: tuple[str, ...] = ()
        self.denies_below = ""
        self.refused = 0
        self.draws = random.Random(0)
        self.lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def refusal(self, method: str, path: str) -> tuple[int, bytes] | None:
        with self.lock:
            answer = (403, _DENIED) if method in self.denies and self.denies_below in path else None
            if answer is None and self.draws.random() < self.busy_share:
                answer = (503, _BUSY)
            self.refused += answer is not None
        return answer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        refusal = self.server.refusal(self.command, self.path)
        if refusal is not None:
            self._answer(refusal[0], {}, refusal[1])
            return
        upstream = http.client.HTTPConnection(self.server.target, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _NOT_FORWARDED}
        upstream.request(self.command, self.path, body or None, headers)
        response = upstream.getresponse()
        self._answer(response.status, dict(response.getheaders()), response.read())
        upstream.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in _NOT_FORWARDED or (self.command == "HEAD" and name.lower() == "content-length"):
                self.send_header(name, value)
        if self.command != "HEAD" or "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def faulty_proxy(endpoint: str) -> Iterator[FaultyProxy]:
    """Run a proxy in a thread; it fails nothing until it is told to."""
    with FaultyProxy(endpoint) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join(timeout=30)
