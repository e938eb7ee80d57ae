"""Tests of what needs another library, in an environment that has it: `make test-kvpress`. `make test` has none."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("kvpress") is not None else ["test_kvpress*.py"]
