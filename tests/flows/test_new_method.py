"""The page on new methods, followed on a copy of the tree: two files, and nothing that was evaluated is stale."""

import json
import re

import pytest
from outcomes import catalog
from processes import CHECKOUT
from sources import copied_sources

PAGE = (CHECKOUT / "docs" / "how-to" / "new-method.md").read_text().partition("## In a package of your own")[0]
CLASS, _, IMPORT = re.findall(r"```python\n(.+?)```", PAGE, flags=re.DOTALL)
(LINE,) = re.findall(r"```text\n(.+?)```", PAGE, flags=re.DOTALL)
LAST, FIRST_IMPORT = "    H2O,\n", "from kvpolicy.methods.judgeq import"


@pytest.mark.slow  # a pipeline and two commands, each a process
@pytest.mark.timeout(600)
def test_a_method_of_two_files_is_evaluated_and_makes_nothing_stale(kvp, small_run, tmp_path):
    sources, home = copied_sources(tmp_path), tmp_path / "home"
    (sources / "kvpolicy" / "methods" / "half_norm.py").write_text(CLASS)
    registry = sources / "kvpolicy" / "methods" / "registry.py"
    text = registry.read_text()
    assert text.count(LAST) == text.count(FIRST_IMPORT) == 1
    registry.write_text(text.replace(LAST, LAST + LINE).replace(FIRST_IMPORT, IMPORT + FIRST_IMPORT))
    with_method = {"PYTHONPATH": str(sources)}
    assert "half_norm" in kvp("methods", **with_method).stdout
    assert json.loads(kvp("stale", "--json", home=small_run.home, **with_method).stdout) == []

    finished = kvp("evaluate", *small_run.options, "--methods", "random,half_norm", home=home, **with_method)
    assert finished.code == 0, finished.stderr
    assert catalog(home).rows("curves", "method = 'half_norm'")
