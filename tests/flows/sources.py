"""For tests of staleness and repetition: a copy of the sources to change (PYTHONPATH comes first), and the docs."""

import re
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


def documented(command: str) -> set[str]:
    """Top-level keys of a command's JSON document, as docs/repetition.md has them."""
    page = (CHECKOUT / "docs" / "repetition.md").read_text(encoding="utf-8")
    (section,) = (part for part in page.split("\n## ") if part.startswith(f"`{command}"))
    _, _, contract = section.partition("`--json`")
    return {name.partition("[")[0] for name in re.findall(r"^\| `([^`]+)` \|", contract, flags=re.MULTILINE)}
