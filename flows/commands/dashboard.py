"""The command `kvp dashboard`: figures of a home in the browser."""

from collections.abc import Mapping
from typing import Annotated

import typer

from flows.commands.options import HomeOption
from flows.runtime.process import configure_libraries, existing_home
from storage.home import Home

DEFAULT_PORT = 8420
PortOption = Annotated[int, typer.Option(help="Of the dashboard on this machine; 0 for a free one", min=0, max=65535)]


def dashboard(port: PortOption = DEFAULT_PORT, home: HomeOption = None) -> None:
    """Show budget curves, heads, tokens, lineage and runs in the browser, until it is interrupted; it only reads."""
    configure_libraries()
    opened = existing_home(home)
    from dashboards.app.server import HOST, make_app, open_port, serve

    with open_port(port) as listening:
        app = make_app(opened, lambda: running_services(opened))
        print(f"http://{HOST}:{listening.getsockname()[1]}", flush=True)
        serve(app, listening)


def running_services(home: Home) -> Mapping[str, str]:
    """URLs of Prefect's and MLflow's pages, of those that `kvp up` has started for a home and that still run."""
    from flows.services.processes import MLFLOW, SERVER, recorded

    named = {"prefect": recorded(home, SERVER), "mlflow": recorded(home, MLFLOW)}
    return {name: service.url for name, service in named.items() if service is not None and service.runs}
