"""The page and the Markdown: whole, valid, self-contained, the same for the same rows; and what figures show."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plotly.offline import get_plotlyjs
from report_home import BUDGETS, FIDELITY, HEADS, comparison_rows, curve_rows

from dashboards.figures.drawing import Figure, error_bars
from dashboards.figures.head_maps import costs_by_method, draw_cost_boxes
from dashboards.figures.styles import _STYLES, style_of
from dashboards.rendering.formats import ID, duration, interval, listed, number, percent
from dashboards.rendering.pages import render_template
from dashboards.rendering.table import Table, table
from dashboards.report.document import Document, Prose, Section, missing, prose
from dashboards.report.findings import findings_section
from dashboards.report.heads_section import heads_section, places_of, read_heads
from dashboards.report.matrix import draw_matrices
from dashboards.report.training_section import draw_courses
from dashboards.report.view import ReportView
from dashboards.report.writing import _SECTIONS, make_report, render_report_page, write_report
from kvpolicy.methods.registry import method_names

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """A page's elements; fails at a tag that closes another than the one that is open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.tables: list[list[list[str]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"style", "script"} & set(self.open):
            return
        self.texts.append(data)
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def report(planted, task_comparisons) -> Document:
    return make_report(replace(planted.rows, task_comparisons=task_comparisons))


@pytest.fixture(scope="module")
def text(report) -> str:
    return render_report_page(report)


@pytest.fixture(scope="module")
def page(text) -> Page:
    return Page(text)


@pytest.fixture(scope="module")
def markdown(report) -> str:
    return render_template("report.md", document=report)


def markdown_tables(text: str) -> list[list[list[str]]]:
    """Cells of every table, as GitHub would split them."""
    found: list[list[list[str]]] = [[]]
    for line in text.split("\n"):
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif found[-1]:
            found.append([])
    return [rows for rows in found if rows]


def plain(cell: str) -> str:
    return re.sub(r"\\([\\`*|<>_\]])", r"\1", cell.replace("`", "") if ID.search(cell) else cell)


def numbers(report: Document) -> list[Table]:
    found = []
    for section in report.sections:
        for block in section.blocks:
            found += block.tables if isinstance(block, Figure) else [block] if isinstance(block, Table) else []
    return found


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(page, text):
    names = [tag for tag, _ in page.elements]
    assert names.count("h1") == names.count("main") == names.count("title") == 1
    assert "link" not in names and "iframe" not in names and "img" not in names
    assert not [attributes for _, attributes in page.elements if "src" in attributes]
    assert not re.search(r"https?:|//|@import|url\(", text.replace(get_plotlyjs(), ""))
    (policy,) = (a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';") and "http" not in policy and "self" not in policy
    targets = {attributes["href"] for tag, attributes in page.elements if tag == "a"}
    places = {f"#{attributes['id']}" for _, attributes in page.elements if "id" in attributes}
    assert targets == places and len(targets) == len(_SECTIONS)
    assert len(text) < 6_000_000


def test_every_figure_is_inside_the_page_and_has_words_for_who_cannot_see_it(page, text, report):
    figures = [block for section in report.sections for block in section.blocks if isinstance(block, Figure)]
    shown = [attributes for _, attributes in page.elements if attributes.get("class") == "plot"]
    drawings = re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    assert len(shown) == len(drawings) == len(figures) >= 10
    for attributes, drawing, figure in zip(shown, drawings, figures, strict=True):
        assert json.loads(drawing) == json.loads(figure.drawing.to_json())
        assert json.loads(drawing)["data"]
        assert attributes["style"] == f"height: {figure.height}px" and figure.height >= 200
        assert attributes["aria-label"] == figure.label and len(figure.label) > 40
        assert figure.tables


def test_every_section_says_where_it_is_from_and_every_id_is_in_the_catalog(planted, report, text, markdown):
    known = planted.ids()
    for form in (text.replace(get_plotlyjs(), ""), markdown):
        named = set(ID.findall(form))
        assert named <= known
        assert {planted.rows.evaluation_id, planted.rows.run_id} <= named
    for section in report.sections:
        for words in (
            "evaluation",
            "run",
            "model",
            "evaluated prompts",
            "policy sets",
            "code",
            "traces",
            "training prompts",
        ):
            assert section.origin[words], (section.title, words)


def test_both_forms_hold_the_same_tables(page, markdown, report):
    expected = [[list(own.columns), *map(list, own.rows)] for own in numbers(report)]
    assert page.tables == expected
    found = markdown_tables(markdown)
    for rows in found:
        assert all(len(row) == len(rows[0]) for row in rows)
        assert all(re.fullmatch("---:?", cell) for cell in rows[1])
    assert [[[plain(cell) for cell in row] for row in (rows[0], *rows[2:])] for rows in found] == expected


def test_nothing_planted_is_missing_but_the_reward(report):
    said = [
        line
        for section in report.sections
        for block in section.blocks
        if isinstance(block, Prose) and block.kind == "missing"
        for line in block.lines
    ]
    assert [line.split(".")[0] for line in said] == [
        "Not in this run: another objective with the evaluated policies' options, seeds and traces",
        "Not in this run: future attention recomputed on compacted caches (ruler, query-agnostic)",
    ]


def test_the_same_rows_give_the_same_bytes(planted, folder, monkeypatch):
    few = replace(
        planted.rows,
        curves=[row for row in planted.rows.curves if row["task"] == "mean" and row["metric"] == "kl"],
        head_pairs=(),
        heads=(),
        findings=(),
    )
    first = write_report(few, folder)
    content = [path.read_bytes() for path in first]
    assert [path.name for path in first] == ["report.html", "report.md"]
    again = replace(few, curves=few.curves[::-1], comparisons=few.comparisons[::-1], head_costs=few.head_costs[::-1])
    assert [path.read_bytes() for path in write_report(again, folder)] == content
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "report.md"]


def test_every_section_without_its_rows_says_so_and_is_still_there(planted):
    bare = ReportView(
        rows=replace(
            planted.rows,
            comparisons=(),
            samples=(),
            heads=(),
            head_costs=(),
            head_pairs=(),
            findings=(),
            trainings=(),
            models=(),
            other_trainings=(),
            curves=[row for row in planted.rows.curves if row["budget"] == 64 and row["metric"] == "kl"],
        )
    )
    silent = {"curves", "lineage"}  # the curves are there, and lineage always is
    for make in _SECTIONS:
        section = make(bare)
        lines = [b.lines[0] for b in section.blocks if isinstance(b, Prose) and b.kind == "missing"]
        assert section.anchor in silent or lines, section.title
        assert all(line.startswith("Not in this run: ") and "`kvp" in line for line in lines), lines


def test_two_benchmarks_have_curves_and_matrices_apart(planted):
    second = {"benchmark": "oasst2", "metric": "kl"}
    view = ReportView(
        rows=replace(
            planted.rows,
            curves=[*curve_rows(), *(row for row in curve_rows(benchmark="oasst2", tasks=()) if row["metric"] == "kl")],
            comparisons=[*comparison_rows(), *comparison_rows(benchmark=second["benchmark"])],
        )
    )
    assert view.places == [("oasst2", "query_agnostic"), ("ruler", "query_agnostic")]
    mean, tasks = view.panels_of(("oasst2", "query_agnostic"), "kl")
    assert mean is not None and tasks == []
    assert {panel.task for panel in view.panels_of(("ruler", "query_agnostic"), "kl")[1]} == {"niah_single_1", "vt"}
    assert view.share(("ruler", "query_agnostic"), 64) == 0.1
    assert view.share(("oasst2", "query_agnostic"), 64) is None


def test_heat_maps_have_layers_from_left_to_right_and_heads_from_top_to_bottom(planted):
    view = ReportView(rows=planted.rows)
    heads = read_heads(view)
    assert list(places_of(heads).places) == HEADS
    assert list(costs_by_method(planted.rows.head_costs, places_of(heads))) == ["kvp", "oracle", "snapkv", "h2o"]
    drawing = drawing_of(heads_section(view), "Cost of each head under kvp and snapkv")
    first, second = (10 ** np.array(trace.z, dtype=float) for trace in drawing.data)
    np.testing.assert_allclose(first, [[1.2, 1.4, 1.6], [1.3, 1.5, 1.7]])
    np.testing.assert_allclose(second, [[2.5, 2.7, 2.9], [2.6, 2.8, 3.0]])
    assert drawing.data[0].zmin == drawing.data[1].zmin and drawing.data[0].zmax == drawing.data[1].zmax
    assert drawing.layout.yaxis.autorange == drawing.layout.yaxis2.autorange == "reversed"


def test_a_matrix_holds_the_confidence_of_the_row_s_method_and_marks_what_is_certain():
    methods = ["kvp", "snapkv", "h2o"]
    rows = [row for row in comparison_rows() if row["is_contest"]]
    cells = {(row["budget"], row["method"], row["other"]): row for row in rows}
    drawing = draw_matrices(methods, BUDGETS, cells)
    by_budget = dict(zip([title.text for title in drawing.layout.annotations], drawing.data, strict=True))
    first, second = by_budget["64 tokens"], by_budget["128 tokens"]
    assert list(map(list, first.z)) == [[None, 0, 1], [1, None, 1], [0, 0, None]]
    assert list(first.x) == list(first.y) == methods
    assert list(map(list, first.text)) == [["", "▼", "▲"], ["▲", "", "▲"], ["▼", "▼", ""]]
    assert not second.text[0][2]
    assert FIDELITY["kvp"][1] < FIDELITY["h2o"][1]  # a little better, but for no certainty


def test_training_curves_are_those_of_the_catalog_by_steps_and_by_seconds(planted):
    trainings = [*planted.rows.trainings, *planted.rows.other_trainings]
    drawing = draw_courses(trainings)
    steps, seconds = ([trace for trace in drawing.data if trace.xaxis == axis] for axis in ("x", "x2"))
    assert [list(line.y) for line in steps] == [list(line.y) for line in seconds]
    assert [list(line.y) for line in steps] == [[3, 2, 1.3], [3, 2, 1.4], [3, 2, 1.8]]
    assert {tuple(line.x) for line in steps} == {(5, 10, 20)}
    assert {tuple(line.x) for line in seconds} == {(2.5, 5.0, 10.0)}
    assert len({line.line.color for line in steps}) == 2  # one for each objective
    assert sum(bool(line.showlegend) for line in drawing.data) == 2
    plain = [replace(t, curve=[row for row in t.curve if row["name"] != "seconds"]) for t in trainings]
    assert {line.xaxis for line in draw_courses(plain).data} == {"x"}


def drawing_of(section: Section, title: str) -> Any:
    (found,) = (b.drawing for b in section.blocks if isinstance(b, Figure) and b.title.startswith(title))
    return found


def test_findings_have_their_intervals_as_bars(planted):
    drawing = drawing_of(findings_section(ReportView(rows=planted.rows)), "Are the best sets nested?")
    values = {
        (row["quantity"], row["larger_budget"], row["budget"]): (row["value"], row["ci_low"], row["ci_high"])
        for row in planted.rows.findings
        if row["analysis"] == "nestedness"
    }
    drawn = {}
    for trace in drawing.data:
        quantity = "overlap" if trace.xaxis == "x" else "excess_missed_mass"
        for budget, value, up, down in zip(
            trace.x, trace.y, trace.error_y.array, trace.error_y.arrayminus, strict=True
        ):
            drawn[quantity, int(trace.legendgroup), budget] = pytest.approx((value, value - down, value + up))
    assert drawn == values
    assert (
        error_bars([1.0], [None], [math.nan])["array"] == error_bars([1.0], [None], [math.nan])["arrayminus"] == [0.0]
    )


def test_boxes_of_heads_are_the_quantiles_of_their_costs():
    costs = np.array([1.0, np.nan, *range(2, 101)], dtype=float)
    box, outside = draw_cost_boxes({"kvp": costs}).data
    assert (box.q1[0], box.median[0], box.q3[0]) == (25.75, 50.5, 75.25)
    assert list(outside.x) == [cost for cost in range(1, 101) if not box.lowerfence[0] <= cost <= box.upperfence[0]]


def test_costs_without_a_finite_number_are_left_out(planted):
    costs = [row | ({"cost": math.inf} if row["method"] != "h2o" else {}) for row in planted.rows.head_costs]
    section = heads_section(ReportView(rows=replace(planted.rows, head_costs=costs)))
    shown = [block.title for block in section.blocks if isinstance(block, Figure)]
    assert any(title.startswith("Cost of each head under h2o:") for title in shown)
    none = [row | {"cost": math.nan} for row in costs]
    section = heads_section(ReportView(rows=replace(planted.rows, head_costs=none)))
    assert any("a finite cost of any head" in b.lines[0] for b in section.blocks if isinstance(b, Prose))


def test_every_method_has_a_look_of_its_own():
    names = method_names()
    assert set(names) <= set(_STYLES)
    assert len({style_of(name).colour for name in names}) == len(names)
    marked = [style_of(name).marker for name in names if style_of(name).marker]
    assert len(set(marked)) == len(marked) == len(names) - 2  # lines of the bounds are told by their dashes


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=30).filter(
    lambda t: "`" not in t
)


@settings(max_examples=60, deadline=None)
@given(name=TEXTS, cell=TEXTS)
def test_whatever_is_in_a_name_stays_text(name, cell):
    document = Document(
        title=name,
        summary=(cell,),
        sections=(
            Section(
                anchor="a",
                title=name,
                blocks=(prose(cell), table(name, ("x", "y"), [(name, cell)])),
                origin={"run": ["run-1"]},
            ),
        ),
    )
    page = Page(render_report_page(document))
    assert page.tables == [[["x", "y"], [name, cell]]]
    assert {tag for tag, _ in page.elements} <= {
        "html", "head", "meta", "title", "style", "body", "h1", "div", "p", "nav", "ol", "li", "a", "main", "section",
        "h2", "table", "caption", "thead", "tr", "th", "tbody", "td", "code",
    }  # fmt: skip
    (rows,) = markdown_tables(render_template("report.md", document=document))
    assert [len(row) for row in rows] == [2, 2, 2]


def test_a_table_with_a_cell_too_many_is_refused():
    with pytest.raises(ValueError, match="table 't': 1 cells for 2 columns"):
        table("t", ("a", "b"), [("x",)])


def test_numbers_read_well():
    assert [number(v) for v in (0.0, 0.3125, 12.345, 999.4, 123456.0, 1.5e-7, None, float("nan"))] == [
        "0", "0.312", "12.3", "999", "123,456", "1.5e-07", "–", "–",
    ]  # fmt: skip
    assert (number(0.5, signed=True), number(-0.5, signed=True), number(0.0, signed=True)) == ("+0.5", "-0.5", "0")
    assert (interval(0.1, 0.25), interval(None, 0.2), interval(float("nan"), 1)) == (
        "[0.1, 0.25]",
        "[no interval]",
        "[no interval]",
    )
    assert [percent(v) for v in (0.051, 0.1, 0.5, 0.0999)] == ["5.1 %", "10 %", "50 %", "10 %"]
    assert [duration(v) for v in (0.04, 12.3, 90, 5400)] == ["0.0 s", "12.3 s", "1 min 30 s", "1 h 30 min"]
    assert [listed(v) for v in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
    assert missing("x", "Do y.").lines == ("Not in this run: x. Do y.",)
