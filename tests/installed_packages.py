"""Packages as pip installs them, of files that docs/how-to/new-method.md shows or a test writes."""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "new-method.md"


def documented_package() -> dict[str, str]:
    """File name -> text of the package that the page shows."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition("## In a package of your own")
    return dict(re.findall(r"`([\w.]+)`:\n\n```\w+\n(.+?)```", section, flags=re.DOTALL))


def install(files: Mapping[str, str], *, source: Path, into: Path) -> Path:
    """Write a package to `source` and let pip install it alone into a folder for PYTHONPATH, emptied first."""
    source.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (source / name).write_text(text, encoding="utf-8")
    shutil.rmtree(into, ignore_errors=True)  # with `--target` pip leaves the metadata of an earlier version
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
    alone = ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(into)]
    subprocess.run([*pip, *alone, str(source)], check=True, capture_output=True, text=True)
    return into
