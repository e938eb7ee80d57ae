"""The command `kvp dashboard`: figures of a home in the browser."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.commands.options import HomeOption
from flows.runtime.process import configure_libraries, home_path
from storage.home import Home

if TYPE_CHECKING:
    from dashboards.app.comparing import ComparisonQuestion

DEFAULT_PORT = 8420
PortOption = Annotated[int, typer.Option(help="Of the dashboard on this machine; 0 for a free one", min=0, max=65535)]


def dashboard(port: PortOption = DEFAULT_PORT, home: HomeOption = None) -> None:
    """Show budget curves, heads, tokens, lineage and runs in the browser, until it is interrupted; it only reads."""
    configure_libraries()
    opened = Home.open(home_path(home), create=False)
    from dashboards.app.server import HOST, make_app, open_port, serve

    with open_port(port) as listening:
        app = make_app(opened, lambda: running_services(opened), lambda question: compare_scores(opened, question))
        print(f"http://{HOST}:{listening.getsockname()[1]}", flush=True)
        serve(app, listening)


def running_services(home: Home) -> Mapping[str, str]:
    """URLs of Prefect's and MLflow's pages, of those that `kvp up` has started for a home and that still run."""
    from flows.services.processes import MLFLOW, SERVER, recorded

    named = {"prefect": recorded(home, SERVER), "mlflow": recorded(home, MLFLOW)}
    return {name: service.url for name, service in named.items() if service is not None and service.runs}


def compare_scores(home: Home, question: "ComparisonQuestion") -> list[dict[str, Any]]:
    """Compare methods within a task, or by some seeds, as the evaluation itself compared them over all.

    Args:
        home: The home.
        question: Which curves.

    Returns:
        Rows like those of the table `comparisons`; none if the scores of the samples are lost.
    """
    from kvpolicy.results.budget_curves import MEAN_TASK, resample_scores
    from kvpolicy.results.comparisons import compare_methods
    from storage.catalog.catalog import Catalog
    from tasks.inputs.stored_scores import stored_bootstrap, stored_scores

    catalog = Catalog(home)
    wanted = {"benchmark": question.benchmark, "setting": question.setting, "metric": question.metric}
    if question.task != MEAN_TASK:
        wanted["task"] = question.task
    scores = stored_scores(catalog, question.run_id, **wanted)
    chosen = [score for score in scores if (score.method, score.seed) in question.seeds]
    tables = resample_scores(chosen, stored_bootstrap(catalog, question.run_id))
    return [comparison.to_row() for comparison in compare_methods(tables)]
