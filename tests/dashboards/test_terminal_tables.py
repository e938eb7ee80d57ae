import io
import re
from typing import Any

import pytest
from curve_points import BUDGETS, METHODS, many_rows, point
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dashboards.rendering.formats import short_number
from dashboards.terminal_tables import curve_table, stage_table


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return many_rows()


def render(table: Table, width: int = 200) -> str:
    stream = io.StringIO()
    Console(width=width, file=stream).print(table)
    return stream.getvalue()


def cells(table: Table, column: int) -> list[Text]:
    return list(table.columns[column].cells)


def test_methods_by_budgets(rows):
    table = curve_table(rows, metric="kl", setting="query_agnostic")
    assert [column.header for column in table.columns] == ["method", *map(str, BUDGETS)]
    assert list(table.columns[0].cells) == METHODS
    assert cells(table, 1)[METHODS.index("oracle")].plain == ".080 [.064, .088]"
    assert "query-agnostic" in table.title
    assert "lower is better" in table.title


@pytest.mark.parametrize(("metric", "best"), [("kl", "kvp"), ("string_match", "tova")])
def test_the_best_value_is_bold_bounds_aside(metric: str, best: str):
    rows = [
        point(method=method, metric=metric, value=value)
        for method, value in {"kvp": 0.2, "h2o": 0.3, "tova": 0.4, "oracle": 0.1, "full": 0.0}.items()
    ]
    if metric == "string_match":
        rows = [row | {"value": 0.9} if row["method"] in ("oracle", "full") else row for row in rows]
    table = curve_table(rows, metric=metric, setting="query_agnostic")
    bold = [name for name, cell in zip(table.columns[0].cells, cells(table, 1), strict=True) if cell.style == "bold"]
    assert bold == [best]


def test_ties_are_all_bold():
    table = curve_table([point(), point(method="h2o")], metric="kl", setting="query_agnostic")
    assert [cell.style for cell in cells(table, 1)] == ["bold", "bold"]


def test_marks_only_where_the_learned_policy_is_better(rows):
    table = curve_table(rows, metric="kl", setting="query_agnostic", better={64: True, 96: False, 9999: True})
    marked = [(str(c.header), cell.plain) for c in table.columns[1:] for cell in c.cells if "†" in cell.plain]
    assert [budget for budget, _ in marked] == ["64"]
    assert cells(table, 2)[0].plain.split()[0].endswith("†")
    assert "the paired intervals exclude 0" in render(table)
    assert "†" not in render(curve_table(rows, metric="kl", setting="query_agnostic"))


def test_settings_and_tasks_are_never_mixed():
    rows = [point(), point(setting="query_aware", value=0.9), point(task="vt", value=0.7)]
    assert ".50 [" in render(curve_table(rows, metric="kl", setting="query_agnostic"))
    assert ".90 [" in render(curve_table(rows, metric="kl", setting="query_aware"))
    assert ".70 [" in render(curve_table(rows, metric="kl", setting="query_agnostic", task="vt"))


def test_a_method_without_a_budget_shows_a_dash():
    rows = [point(), point(method="h2o", budget=128)]
    table = curve_table(rows, metric="kl", setting="query_agnostic")
    assert [cell.plain for cell in cells(table, 2)] == ["–", ".50 [.40, .60]"]


@pytest.mark.parametrize("width", [80, 100, 250])
def test_no_digit_is_cut_at_any_width(rows, width: int):
    table = curve_table(rows, metric="kl", setting="query_agnostic")
    text = render(table, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    if width == 250:
        assert all(cell.plain in text for column in table.columns[1:] for cell in column.cells)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric": "speed", "setting": "query_agnostic"}, "no curve points of */query_agnostic/speed for task 'mean'"),
        ({"metric": "kl", "setting": "query_aware"}, "there are longbench/query_agnostic/kl"),
        ({"metric": "kl", "setting": "query_agnostic"}, "several benchmarks (longbench, ruler): name one"),
    ],
)
def test_what_is_not_there_is_one_clear_line(arguments: dict[str, str], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        curve_table([point(), point(benchmark="longbench")], **arguments)
    curve_table([point(), point(benchmark="longbench")], metric="kl", setting="query_agnostic", benchmark="ruler")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.000042, "4e-5"),
        (0.00094, "9e-4"),
        (0.00096, ".00096"),
        (0.0131, ".013"),
        (0.5, ".50"),
        (0.994, ".99"),
        (0.996, "1.0"),
        (1, "1.0"),
        (9.94, "9.9"),
        (9.96, "10"),
        (85.4, "85"),
        (-0.05, "-.050"),
    ],
)
def test_numbers_are_short(value: float, text: str):
    assert short_number(value) == text


def test_stages_with_time_and_what_was_skipped():
    stages = {"collect": {"seconds": 131.2, "skipped": False}, "train": {"seconds": 0.02, "skipped": True}}
    text = render(stage_table(stages))
    assert re.search(r"collect +2 min 11 s", text)
    assert re.search(r"train +0.0 s +skipped: nothing changed", text)
    assert re.search(r"total +2 min 11 s", text)


@pytest.mark.parametrize(("seconds", "text"), [(59.94, "59.9 s"), (59.96, "1 min 00 s"), (3725, "1 h 02 min")])
def test_durations_round_over_the_minute(seconds: float, text: str):
    assert text in render(stage_table({"train": {"seconds": seconds, "skipped": False}}))


def test_a_point_without_an_interval_shows_none():
    rows = [point(method="kvp", value=0.5, ci_low=None, ci_high=None), point(method="h2o", value=0.25)]
    table = curve_table(rows, metric=rows[0]["metric"], setting=rows[0]["setting"])
    shown = {name: cell.plain for name, cell in zip(cells(table, 0), cells(table, 1), strict=True)}
    assert shown["kvp"] == ".50"
    assert shown["h2o"].startswith(".25 [")
