# `make demo` and `make test` are all that a fresh clone needs; everything lives in .venv and .kvp.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# kvpress needs older releases of transformers and pandas than the rest.
KVPRESS_BIN := .venv-kvpress/bin
KVPRESS_INSTALLED := .venv-kvpress/.installed

.PHONY: setup demo smoke test test-slow test-kvpress bench docs lint types contract

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "make: $(PYTHON) is not Python 3.11 or newer: install it, or name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv .venv || \
		{ echo "make: $(PYTHON) cannot make .venv: install its venv module, such as python3-venv" >&2; exit 1; }
	@echo "make: installing into .venv, a few minutes the first time" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	@$(BIN)/kvp run --preset demo

smoke: setup
	@$(BIN)/kvp run --preset smoke

# Two at a time: half of the tests wait for servers and processes. Files stay whole, and share what they set up.
test: setup
	@$(BIN)/pytest -n 2 --dist loadfile

test-slow: setup
	@$(BIN)/pytest -m slow -n 2 --dist loadfile

# The adapter to kvpress and all of the science, in an environment of their own.
test-kvpress: $(KVPRESS_INSTALLED)
	@TQDM_DISABLE=1 $(KVPRESS_BIN)/pytest tests/kvpolicy

$(KVPRESS_INSTALLED): pyproject.toml constraints-kvpress.txt
	@$(PYTHON) -m venv .venv-kvpress
	@echo "make: installing into .venv-kvpress, a few minutes the first time" >&2
	@$(KVPRESS_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-kvpress.txt \
		-e . kvpress beartype hypothesis pytest pytest-timeout
	@touch $@

bench: setup
	@$(BIN)/pytest -m benchmark -s

docs: setup
	@$(BIN)/python docs/reference/write.py

lint: setup
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: setup
	@$(BIN)/mypy

contract: setup
	@$(BIN)/lint-imports
