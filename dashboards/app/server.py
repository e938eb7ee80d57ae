"""The dashboard's server: one route a page, on this machine alone, and it only answers GET.

Every figure is drawn by the plotly.js that comes with plotly, so that nothing is fetched from elsewhere. A damaged home
is reported on the page.
"""

import functools
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qs

from plotly.offline import get_plotlyjs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from dashboards.app.choosing import FindServices
from dashboards.app.content import NAVIGATION, Nothing, Page, render
from dashboards.app.curves_page import curves_file, curves_page
from dashboards.app.heads_page import heads_page
from dashboards.app.lineage_page import lineage_page
from dashboards.app.records import Records
from dashboards.app.runs_page import runs_page
from dashboards.app.selection import Selection
from dashboards.app.similarity_page import similarity_page
from dashboards.app.tokens_page import tokens_page
from kvpolicy.errors import first_line
from storage.errors import StorageError
from storage.home import Home

HOST = "127.0.0.1"
_STATIC = Path(__file__).parent / "static"
_POLICY = (  # scripts and data from here only; plotly sets styles, and makes images of figures
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; object-src 'none'; "
    "base-uri 'none'; form-action 'self'"
)


def make_app(home: Home, find_services: FindServices = dict) -> Starlette:
    """The application.

    Args:
        home: what it shows.
        find_services: asked whenever links into other pages are shown.
    """
    records = Records(home)
    pages: Mapping[str, Callable[[Selection], Page]] = {
        "curves": functools.partial(curves_page, records, find_services),
        "heads": functools.partial(heads_page, records),
        "tokens": functools.partial(tokens_page, records),
        "similarity": functools.partial(similarity_page, records),
        "lineage": functools.partial(lineage_page, records),
        "runs": functools.partial(runs_page, records, find_services),
    }

    def endpoint(name: str) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            selection = _selection(request)
            page = _built(pages[name], selection)
            return HTMLResponse(render(page, name, selection, home=str(home.path)), status_code=page.status)

        return answer

    def curves_csv(request: Request) -> Response:
        try:
            text, status = curves_file(records, _selection(request)), 200
        except (Nothing, StorageError) as error:
            text, status = f"{error}\n", 404 if isinstance(error, Nothing) else 500
        return Response(text, status_code=status, media_type="text/csv")

    def failed(request: Request, error: Exception) -> Response:
        """Answer an unexpected error: the page gets one sentence, the server's log the traceback."""
        status, headers = 500, None
        if isinstance(error, HTTPException):
            status, headers = error.status_code, error.headers
            missing = f"There is no page {request.url.path} here."
            if status == 405:
                missing = f"{request.url.path} is only read here: ask for it with GET, not {request.method}."
        else:
            missing = f"This page could not be made: {first_line(error)}"
        text = render(_message(missing, status=status), "", Selection(asked={}), home=str(home.path))
        return HTMLResponse(text, status_code=status, headers=headers)

    routes = [
        Route("/", lambda request: RedirectResponse("/curves")),
        *(Route(f"/{name}", endpoint(name)) for name in NAVIGATION),
        Route("/curves.csv", curves_csv),
        Route("/plotly.js", _plotlyjs),
        Mount("/static", StaticFiles(directory=_STATIC)),
    ]
    middleware = [
        # A page of another site that resolves its name to this machine must not read from here.
        Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"]),
        Middleware(BaseHTTPMiddleware, dispatch=_guarded),
        Middleware(GZipMiddleware, minimum_size=2000),
    ]
    return Starlette(
        routes=routes, middleware=middleware, exception_handlers={HTTPException: failed, Exception: failed}
    )


async def _guarded(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Add to every answer the headers that limit a browser."""
    answer = await call_next(request)
    answer.headers["Content-Security-Policy"] = _POLICY
    answer.headers["X-Content-Type-Options"] = "nosniff"
    answer.headers.setdefault("Cache-Control", "no-cache")
    return answer


def _selection(request: Request) -> Selection:
    return Selection(asked=parse_qs(request.url.query, keep_blank_values=True))


def _built(build: Callable[[Selection], Page], selection: Selection) -> Page:
    try:
        return build(selection)
    except Nothing as nothing:
        return _message(nothing.missing, nothing.remedy)
    except StorageError as error:
        return _message(str(error), status=500)


def _message(missing: str, remedy: str = "", *, status: int = 200) -> Page:
    content = {"title": "Nothing to show" if status == 200 else "Not available", "missing": missing, "remedy": remedy}
    return Page(template="message.html", content=content, status=status)


@functools.cache
def _plotlyjs_bytes() -> bytes:
    text: str = get_plotlyjs()
    return text.encode()


def _plotlyjs(request: Request) -> Response:
    del request
    headers = {"Cache-Control": "max-age=86400"}
    return Response(_plotlyjs_bytes(), media_type="text/javascript", headers=headers)


def open_port(port: int) -> socket.socket:
    """Listen on a port of this machine; call it before the address is printed.

    Args:
        port: which; 0 for a free one.

    Raises:
        StorageError: if it is in use or not allowed.
    """
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise StorageError(
            f"port {port} cannot be used ({reason}): give the dashboard another --port, or 0 for a free one"
        ) from error


def serve(app: Starlette, listening: socket.socket) -> None:
    """Answer until the process is interrupted."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False))
    with suppress(KeyboardInterrupt):  # the usual end, once the last answers are out
        server.run(sockets=[listening])
