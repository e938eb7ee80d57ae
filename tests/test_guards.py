"""Rules that no other tool checks: one way to write a task, no stand-ins in tests, nothing that is read is run."""

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.code_lines import count_code_lines

CHECKOUT = Path(__file__).parents[1]
PACKAGES = ("kvpolicy", "storage", "tasks", "flows", "dashboards")
STAND_INS = ("unittest.mock", "mock", "pytest_mock", "responses", "requests_mock", "respx", "vcr")


def _trees(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((CHECKOUT / folder).rglob("*.py")):
            yield str(path.relative_to(CHECKOUT)), ast.parse(path.read_text(encoding="utf-8"))


def _imports(tree: ast.Module) -> set[str]:
    """Full names of everything imported: `import a.b` gives `a.b`, `from a import b` gives `a` and `a.b`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _prefect_tasks(tree: ast.Module) -> set[str]:
    """Uses of Prefect's own `task`, however it is reached."""
    named = {
        name
        for name in _imports(tree)
        if name in ("prefect.task", "prefect.tasks") or name.startswith("prefect.tasks.")
    }
    reached = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in (("prefect", "task"), ("prefect", "tasks"))
    }
    return named | reached


def test_only_the_project_s_decorator_makes_tasks():
    users = {path for path, tree in _trees(*PACKAGES) if _prefect_tasks(tree)}
    assert users == {"tasks/framework/stage.py"}


def test_names_say_what_they_hold():
    vague = {"told", "own", "found", "said", "about"}
    for path, tree in _trees(*PACKAGES):
        stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        assert not (stored | arguments) & vague, path


def test_tests_use_no_stand_ins():
    for path, tree in _trees("tests"):
        assert not {name for name in _imports(tree) if name in STAND_INS or name.startswith("unittest.mock.")}, path
        parameters = {
            argument.arg
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            for argument in (*node.args.args, *node.args.kwonlyargs)
        }
        assert "mocker" not in parameters, path


def _ways_to_run_what_is_read(tree: ast.Module) -> set[str]:
    """Calls that run what a file holds or wait for consent: unpickling, `eval`, `input`, transformers with a say."""
    modules = ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
    found = {name for name in _imports(tree) if name.partition(".")[0] in modules}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        settings = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name in ("eval", "exec", "input", "torch.load", "yaml.load", "yaml.unsafe_load"):
            found.add(name)
        if name.endswith(".from_pretrained") and settings.get("trust_remote_code") != "False":
            found.add(name)
    return found


def test_nothing_that_is_read_is_run():
    ways = {path: found for path, tree in _trees(*PACKAGES) if (found := _ways_to_run_what_is_read(tree))}
    assert ways == {}


def test_the_guards_see_what_they_look_for():
    for text in (
        "import pickle",
        "from cloudpickle import loads",
        "eval(text)",
        "input('y?')",
        "torch.load(path)",
        "AutoConfig.from_pretrained(folder, local_files_only=True)",
        "AutoConfig.from_pretrained(folder, trust_remote_code=True)",
    ):
        assert _ways_to_run_what_is_read(ast.parse(text)), text
    assert not _ways_to_run_what_is_read(ast.parse("network.eval()\nA.from_pretrained(b, trust_remote_code=False)"))
    for text in (
        "from prefect import flow, task",
        "import prefect\n@prefect.task\ndef f(): ...",
        "from prefect.tasks import Task",
    ):
        assert _prefect_tasks(ast.parse(text)), text
    assert not _prefect_tasks(ast.parse("from prefect import flow\nfrom prefect.runtime import task_run"))
    assert "unittest.mock" in _imports(ast.parse("from unittest import mock"))


def test_no_test_changes_the_number_of_threads():
    # Sums in float32 differ with it, and what runs here is compared with what child processes compute.
    assert torch.get_num_threads() == 2


def test_lines_of_code_are_counted_without_docstrings_comments_and_blanks():
    page = '"""Page.\n\nMore.\n"""\n\nimport math  # why\n\n'
    function = 'def f(\n    x,\n):\n    """Doc."""\n    # why\n    return """a\n\nb"""\n'
    assert count_code_lines(page + function) == 1 + 3 + 3
