"""What the tests of reports share: one home with planted results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from report_home import EVALUATION, comparison_rows, make_home

from dashboards.report.evaluation_rows import ReportRows, read_report_rows
from storage.catalog.catalog import Catalog
from storage.home import Home


@dataclass(frozen=True, kw_only=True)
class PlantedHome:
    """A home, and the run of each of its stages."""

    catalog: Catalog
    runs: dict[str, str]
    rows: ReportRows

    def ids(self) -> set[str]:
        """Every id of the catalog."""
        artifacts = {row["artifact_id"] for row in self.catalog.rows("artifacts")}
        return artifacts | {row["run_id"] for row in self.catalog.rows("runs")}


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> PlantedHome:
    home = Home.open(tmp_path_factory.mktemp("report") / "home")
    runs = make_home(home)
    catalog = Catalog(home)
    return PlantedHome(catalog=catalog, runs=runs, rows=read_report_rows(catalog, EVALUATION.artifact_id))


@pytest.fixture(scope="session")
def task_comparisons() -> list[dict[str, Any]]:
    """As those over all tasks: a shift that all methods have in common changes no difference."""
    return [row | {"task": task, "n": 4} for task in ("niah_single_1", "vt") for row in comparison_rows()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "out"
