"""Counts the lines of product code without docstrings, comments and blank lines: `python tests/code_lines.py`."""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
PACKAGES = ("kvpolicy", "storage", "tasks", "flows", "dashboards")
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def count_code_lines(source: str) -> int:
    """Lines that hold a token of code; a text that is a statement of its own, such as a docstring, is none."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - set(_lines_of_bare_texts(ast.parse(source))))


def _lines_of_bare_texts(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_constant and isinstance(node.value.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def count_packages() -> dict[str, int]:
    """Lines of code of each package."""
    return {
        package: sum(count_code_lines(path.read_text(encoding="utf-8")) for path in (CHECKOUT / package).rglob("*.py"))
        for package in PACKAGES
    }


if __name__ == "__main__":
    counts = count_packages()
    for package, count in (counts | {"together": sum(counts.values())}).items():
        sys.stdout.write(f"{package:10} {count:6,}\n")
