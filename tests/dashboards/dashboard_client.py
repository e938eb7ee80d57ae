"""The dashboard as a client in this process asks it."""

from starlette.testclient import TestClient

from dashboards.app.server import make_app
from storage.home import Home


def client_of(home: Home, **services: str) -> TestClient:
    return TestClient(make_app(home, lambda: services), base_url="http://127.0.0.1")


def page(client: TestClient, url: str, *, status: int = 200) -> str:
    answer = client.get(url)
    assert answer.status_code == status, answer.text
    return answer.text
