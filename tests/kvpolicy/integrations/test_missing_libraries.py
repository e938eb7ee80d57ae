"""Adapters to other libraries say what is missing; with the libraries they are tested by `make test-kvpress`."""

import subprocess
import sys


def test_without_kvpress_the_adapter_says_how_to_get_it():
    code = "import sys; sys.modules['kvpress'] = None; import kvpolicy.integrations.kvpress"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode
    assert ended.stderr.splitlines()[-1].startswith("ImportError: kvpress cannot be imported (")
    assert ended.stderr.splitlines()[-1].endswith("(constraints-kvpress.txt)")
