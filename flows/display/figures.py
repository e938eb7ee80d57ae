"""Drawing an evaluation's curves into the home and into its MLflow run."""

from pathlib import Path

from dashboards.figures.curve_picture import write_figures
from storage.catalog.catalog import Catalog
from storage.home import Home
from storage.mlflow.tracking import Tracking
from tasks.framework.references import EvaluationRef


def figure_folder(home: Home, evaluation_id: str) -> Path:
    """Where an evaluation's figures lie."""
    return home.figures / evaluation_id


def draw_figures(home: Home, evaluation: EvaluationRef) -> list[Path]:
    """Draw the budget curves as a picture and as a page, and keep copies with the MLflow run, unless that was done."""
    folder = figure_folder(home, evaluation.artifact_id)
    logged = folder / ".logged"  # written last, with the run: after a kill, or for another run, it is done again
    if not (logged.exists() and logged.read_text(encoding="utf-8") == evaluation.mlflow_run_id):
        catalog = Catalog(home)
        curves = catalog.rows("curves", f"run_id = '{evaluation.run_id}'")
        for figure in write_figures(curves, folder, catalog.artifact(evaluation.artifact_id).name):
            Tracking(home).log_artifact(evaluation.mlflow_run_id, figure, "figures")
        logged.write_text(evaluation.mlflow_run_id, encoding="utf-8")
    return sorted(folder.glob("budget_curves.*"))
