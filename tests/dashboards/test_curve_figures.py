import json
import re
from pathlib import Path
from typing import Any

import pytest
from curve_points import BUDGETS, METHODS, SETTINGS, TASKS, many_rows, point
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread

from dashboards.figures.curve_picture import HTML_NAME, PNG_NAME, draw_picture, write_figures
from dashboards.figures.curves import render_page
from dashboards.figures.series import make_panels
from dashboards.figures.styles import style_of


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return many_rows()


@pytest.fixture(scope="module")
def picture(rows) -> Figure:
    return draw_picture(make_panels(rows), "t")


@pytest.fixture(scope="module")
def page(rows) -> str:
    return render_page(make_panels(rows), "t")


def axes_of(figure: Figure) -> list[Axes]:
    return [ax for ax in figure.axes if ax.axison]


def drawn_axes(rows: list[dict[str, Any]]) -> list[Axes]:
    return axes_of(draw_picture(make_panels(rows), "t"))


def views(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="views">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def lines(view: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in view["figure"]["data"] if trace.get("showlegend", True)}


def test_writes_a_picture_of_1200_pixels_and_a_page_and_leaves_nothing_else(rows, tmp_path: Path):
    folder = tmp_path / "figures" / "new"
    paths = write_figures(rows, folder, "Title")
    assert paths == [folder / PNG_NAME, folder / HTML_NAME]
    assert sorted(path.name for path in folder.iterdir()) == sorted([PNG_NAME, HTML_NAME])
    assert imread(paths[0]).shape[1] == 1200


def test_writing_again_gives_the_same_bytes(tmp_path: Path):
    rows = [point(method=method, budget=budget) for method in ("kvp", "h2o") for budget in (64, 128)]
    first = [path.read_bytes() for path in write_figures(rows, tmp_path, "Title")]
    assert [path.read_bytes() for path in write_figures(rows[::-1], tmp_path, "Title")] == first


def test_a_failed_write_keeps_the_old_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / PNG_NAME).write_bytes(b"old")

    def fail(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_figures([point()], tmp_path, "Title")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(PNG_NAME, b"old")]


def test_the_picture_has_a_panel_for_each_setting_and_metric(picture):
    axes = axes_of(picture)
    assert [ax.get_yscale() for ax in axes] == ["log", "linear"] * 2
    assert all(ax.get_xscale() == "log" for ax in axes)
    for ax in axes:
        assert [label.get_text() for label in ax.get_xticklabels()] == [str(budget) for budget in BUDGETS]
        assert list(ax.get_xticks()) == BUDGETS
        expected = set(METHODS) - ({"full"} if ax.get_yscale() == "log" else set())
        assert {line.get_label() for line in ax.lines} == expected
        assert len(ax.collections) == len(expected)  # a band each
        assert all(len(line.get_xdata()) == len(BUDGETS) for line in ax.lines)


def test_analyses_are_drawn_only_where_nothing_is_competed_for():
    rows = [point(metric=metric) for metric in ("kl", "missed_mass", "reward_correlation")]
    assert len(drawn_axes(rows)) == 1
    assert len(drawn_axes(rows[1:])) == 2


def test_the_learned_policy_stands_out_and_the_bounds_are_dashed_and_dotted(picture):
    by_name = {line.get_label(): line for line in axes_of(picture)[1].lines}
    others = [line for name, line in by_name.items() if name != "kvp"]
    assert by_name["kvp"].get_linewidth() > 1.5 * max(line.get_linewidth() for line in others)
    assert by_name["kvp"].get_zorder() > max(line.get_zorder() for line in others)
    assert (by_name["oracle"].get_linestyle(), by_name["full"].get_linestyle()) == ("--", ":")


def test_every_method_has_its_own_look_whatever_else_is_drawn(rows, picture):
    assert len({(style_of(method).colour, style_of(method).marker) for method in METHODS}) == len(METHODS)
    few = [row for row in rows if row["method"] in ("h2o", "tova")]
    for ax in (axes_of(picture)[0], drawn_axes(few)[0]):
        assert {to_hex(line.get_color()).upper() for line in ax.lines if line.get_label() == "h2o"} == {"#44AA99"}
    assert style_of("a_new_method") == style_of("a_new_method")


def test_the_legend_names_every_method_once_and_says_what_the_bands_are(picture):
    legend = picture.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == METHODS
    assert "48 samples" in legend.get_title().get_text()
    assert "kvp (3)" in legend.get_title().get_text()


def test_several_seeds_become_their_mean_and_the_hull_of_their_intervals():
    rows = [
        point(seed=0, value=0.2, ci_low=0.1, ci_high=0.3),
        point(seed=1, value=0.4, ci_low=0.35, ci_high=0.5),
    ]
    (panel,) = make_panels(rows)
    (only,) = panel.series[0].points
    assert (only.value, only.low, only.high, only.num_seeds) == (pytest.approx(0.3), 0.1, 0.5, 2)
    assert drawn_axes(rows)[0].lines[0].get_ydata()[0] == pytest.approx(0.3)


def test_a_missing_interval_is_no_band():
    (panel,) = make_panels([point(ci_low=None, ci_high=float("nan"))])
    assert (panel.series[0].points[0].low, panel.series[0].points[0].high) == (0.5, 0.5)


def test_the_full_cache_is_left_out_of_kl_with_a_note(picture):
    kl, match = axes_of(picture)[:2]
    assert "full: 0, not drawn" in kl.get_title(loc="left")
    assert "not drawn" not in match.get_title(loc="left")
    rows = [point(), point(method="full", value=3e-7, ci_low=0, ci_high=4e-7)]
    assert "full: at most 3e-07, not drawn" in drawn_axes(rows)[0].get_title(loc="left")


@pytest.mark.parametrize("tiny", [0.0, 1e-12])
def test_values_that_a_log_axis_cannot_show_lie_on_a_floor_that_the_label_names(tiny: float):
    rows = [point(), point(budget=128, value=0.02, ci_low=0, ci_high=0.03), point(budget=256, value=tiny, ci_low=0)]
    (ax,) = drawn_axes(rows)
    assert list(ax.lines[0].get_ydata()) == pytest.approx([0.5, 0.02, 0.01])
    assert "drawn at 1e-02" in ax.get_ylabel()
    (view,) = views(render_page(make_panels(rows), "t"))
    assert lines(view)["kvp"]["y"] == pytest.approx([0.5, 0.02, 0.01])
    assert lines(view)["kvp"]["customdata"][2][0] == tiny  # what is read on hover is the value itself
    assert "drawn at 1e-02" in view["figure"]["layout"]["yaxis"]["title"]["text"]
    assert all(y > 0 for trace in view["figure"]["data"] for y in trace["y"])


def test_an_interval_down_to_zero_neither_breaks_nor_stretches_a_log_axis():
    rows = [point(ci_low=0.0), point(budget=128, value=0.1, ci_low=0.0, ci_high=0.2)]
    (ax,) = drawn_axes(rows)
    assert ax.get_ylim()[0] > 0.02
    assert "drawn at" not in ax.get_ylabel()


def test_one_point_and_values_of_zero_alone_are_drawn():
    for rows in ([point()], [point(value=0.0, ci_low=0.0, ci_high=0.0)], [point(method="full", value=0.0, ci_low=0.0)]):
        assert len(drawn_axes(rows)[0].lines[0].get_xdata()) == 1
        assert len(views(render_page(make_panels(rows), "t"))) == 1


def test_what_has_no_rows_is_left_out(rows):
    aware = [row for row in rows if row["setting"] == "query_aware" and row["metric"] != "string_match"]
    (ax,) = drawn_axes(aware)
    assert "question + answer" in ax.get_ylabel()
    (ax,) = drawn_axes([row for row in aware if row["metric"] == "kl_answer"])
    assert "question" not in ax.get_ylabel()
    assert {view["choice"]["setting"] for view in views(render_page(make_panels(aware), "t"))} == {"query_aware"}


def test_benchmarks_get_panels_of_their_own(rows):
    few = [row for row in rows if row["method"] in ("kvp", "h2o")]
    both = few + [row | {"benchmark": "longbench"} for row in few if row["metric"] == "kl"]
    assert len(drawn_axes(both)) == 2 + 4


def test_the_page_holds_every_view_with_every_trace(page):
    found = views(page)
    assert len(found) == len(SETTINGS) * 3 * len(TASKS)
    for view in found:
        expected = set(METHODS) - (set() if view["choice"]["metric"] == "string_match" else {"full"})
        assert set(lines(view)) == expected
        assert len(view["figure"]["data"]) == 2 * len(expected)  # a line and a band each
        assert all(trace["x"] == BUDGETS for trace in lines(view).values())
        assert view["figure"]["layout"]["yaxis"]["type"] == (
            "linear" if view["choice"]["metric"] == "string_match" else "log"
        )


def test_no_view_mixes_settings_and_each_shows_its_own_values(rows):
    few = [row for row in rows if row["method"] in ("kvp", "h2o")]
    rows = [row | {"value": 0.3} if row["setting"] == "query_aware" else row for row in few]
    for view in views(render_page(make_panels(rows), "t")):
        is_marked = [value == pytest.approx(0.3) for trace in lines(view).values() for value in trace["y"]]
        assert all(is_marked) if view["choice"]["setting"] == "query_aware" else not all(is_marked)


def test_the_page_opens_without_network_and_offers_no_upload():
    page = render_page(make_panels([point()]), "Title")
    assert "plotly.js v" in page
    own = page.replace(re.search(r"<script>/\*.*?</script>", page, re.DOTALL)[0], "")
    assert not re.search(r"https?://|<link|\ssrc=", own)
    assert "showSendToCloud: false" in own
    assert all(f'<select id="{name}">' in own for name in ("benchmark", "setting", "metric", "task"))


def test_names_cannot_break_out_of_the_page():
    evil = "</script><script>alert(1)</script>"
    page = render_page(make_panels([point(method=evil, task=evil)]), evil)
    assert evil not in page
    assert views(page)[0]["choice"]["task"] == evil


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no curve points"),
        ([{"method": "kvp"}], "row 0: lacks benchmark"),
        ([point(value=float("nan"))], "finite value, got nan"),
        ([point(value=-0.1)], "expected kl >= 0, got -0.1"),
        ([point(budget=0)], "budget of at least 1 token, got 0"),
        ([point(), point()], "given twice: kvp, ruler/query_agnostic/kl/mean, budget 64, seed 0"),
        ([point(task="vt")], "expected rows whose task is 'mean'"),
    ],
)
def test_rows_that_cannot_be_drawn_are_one_clear_line_and_no_file(rows, message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        write_figures(rows, tmp_path, "t")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
