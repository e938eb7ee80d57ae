"""Tests of what needs another library, in an environment that has it: `make test-kvpress`. `make test` has none."""

from importlib.util import find_spec

import pytest

HAS_KVPRESS = find_spec("kvpress") is not None
collect_ignore_glob = [] if HAS_KVPRESS else ["test_kvpress*.py"]

# What kvpress and its dependencies warn of.
_WARNINGS = ("ignore:'pipes' is deprecated:DeprecationWarning",)  # fire 0.6 on Python 3.11 and 3.12


def pytest_configure(config: pytest.Config) -> None:
    if HAS_KVPRESS:
        for warning in _WARNINGS:
            config.addinivalue_line("filterwarnings", warning)
