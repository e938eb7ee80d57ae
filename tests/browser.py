"""A real browser for tests: Debian's Chromium without a window, driven by playwright, with a profile of its own."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def open_browser(profile: Path) -> Iterator[Any]:
    """Run a browser; gives playwright's context, which makes pages. Without Chromium the test is left out, and says so.

    Args:
        profile: folder for what it keeps; it must be empty.
    """
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip("Chromium is not installed: apt-get install -y chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            str(profile), executable_path=program, headless=True, args=list(_FLAGS), accept_downloads=True
        )
        try:
            yield context
        finally:
            context.close()
