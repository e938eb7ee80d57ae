"""A hub of one repository on loopback: what huggingface_hub asks to learn a revision and to fetch its files."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

REPOSITORY = "owner/name"


class HubRepository:
    """A repository whose newest commit has the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""

    @property
    def commit(self) -> str:
        """Forty hexadecimal characters that change with the files."""
        files = [path.name.encode() + path.read_bytes() for path in sorted(self.folder.iterdir())]
        return hashlib.sha1(b"".join(files), usedforsecurity=False).hexdigest()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a path of the hub's API."""
        commit = self.commit
        if path.startswith(f"/api/models/{REPOSITORY}"):
            if "/tree/" in path:
                entries = [{"type": "file", "path": name, "size": size, "oid": commit} for name, size in self._sizes()]
                return 200, {}, json.dumps(entries).encode()
            siblings = [{"rfilename": name} for name, _ in self._sizes()]
            return 200, {}, json.dumps({"id": REPOSITORY, "sha": commit, "siblings": siblings}).encode()
        start = f"/{REPOSITORY}/resolve/{commit}/"
        if path.startswith(start) and (self.folder / path.removeprefix(start)).is_file():
            content = (self.folder / path.removeprefix(start)).read_bytes()
            etag = hashlib.sha1(content, usedforsecurity=False).hexdigest()
            return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, content
        return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"

    def _sizes(self) -> list[tuple[str, int]]:
        return [(path.name, path.stat().st_size) for path in sorted(self.folder.iterdir())]


@contextmanager
def hub_server(folder: Path) -> Iterator[HubRepository]:
    """Serve the files of a folder as the newest revision of `owner/name`."""
    repository = HubRepository(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._send(with_body=False)

        def do_GET(self) -> None:
            self._send(with_body=True)

        def _send(self, *, with_body: bool) -> None:
            status, headers, body = repository.answer(self.path.partition("?")[0])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Not to the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        repository.url = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield repository
        finally:
            server.shutdown()
