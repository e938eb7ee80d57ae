"""A copy of the project's sources, to be changed and run in place of the checkout's: PYTHONPATH comes first."""

import shutil
from pathlib import Path

from processes import CHECKOUT

PACKAGES = ("kvpolicy", "storage", "tasks", "flows", "dashboards")


def copied_sources(folder: Path) -> Path:
    """Copy the packages and return the folder to name in PYTHONPATH."""
    place = folder / "sources"
    for package in PACKAGES:
        shutil.copytree(CHECKOUT / package, place / package, ignore=shutil.ignore_patterns("__pycache__"))
    return place
