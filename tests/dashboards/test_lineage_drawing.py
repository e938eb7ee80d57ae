"""Drawings of lineage: what is grouped, that nothing overlaps, and that no name can break or leave the page."""

import itertools
import json
import re
from collections import Counter
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from lineage_graphs import HOSTILE, graph, graphs, node, pipeline, run

from dashboards.lineage.groups import group_alike
from dashboards.lineage.layout import lay_out
from dashboards.lineage.picture import draw_lineage, render_lineage_page
from storage.lineage.graph import LineageGraph

SVG = "{http://www.w3.org/2000/svg}"
LEFT_OUT = ("code", "environment", "request")


@given(graphs())
@settings(deadline=None)
def test_groups_hold_every_drawn_node_once_and_alike_ones_only(any_graph: LineageGraph):
    grouped = group_alike(any_graph)
    place = {each.id: index for index, group in enumerate(grouped.groups) for each in group}
    drawn = {name for name, each in any_graph.nodes.items() if each.kind not in LEFT_OUT or name == any_graph.root}
    assert Counter(each.id for group in grouped.groups for each in group) == Counter(drawn)
    assert [each.id for each in grouped.groups[0]] == [any_graph.root]
    edges = [(edge.source, edge.target) for edge in any_graph.edges if {edge.source, edge.target} <= drawn]
    assert set(grouped.flows) == {(place[source], place[target]) for source, target in edges}
    assert len(set(grouped.flows)) == len(grouped.flows)
    for group in grouped.groups:
        assert len({each.kind for each in group}) == 1
        if group[0].kind == "run":
            assert len({(each.name, each.facts["outcome"]) for each in group}) == 1
        sources = {frozenset(place[s] for s, t in edges if t == each.id) for each in group}
        targets = {frozenset(place[t] for s, t in edges if s == each.id) for each in group}
        assert (len(sources), len(targets)) == (1, 1)


@given(graphs())
@settings(deadline=None)
def test_nothing_overlaps_and_flows_lead_to_the_right(any_graph: LineageGraph):
    grouped = group_alike(any_graph)
    layout = lay_out(len(grouped.groups), grouped.flows)
    for (source, target), way in zip(grouped.flows, layout.ways, strict=True):
        assert way[0] == (layout.layers[source], layout.heights[source])
        assert way[-1] == (layout.layers[target], layout.heights[target])
        assert [layer for layer, _ in way] == list(range(layout.layers[source], layout.layers[target] + 1))
    for layer in set(layout.layers):
        heights = sorted(h for h, of in zip(layout.heights, layout.layers, strict=True) if of == layer)
        assert all(lower - upper > 1 - 1e-6 for upper, lower in itertools.pairwise(heights))
        passing = {height for way in layout.ways for of, height in way[1:-1] if of == layer}
        assert all(abs(lane - height) > 0.69 for lane in passing for height in heights)
    assert min(layout.heights) > 0.5 - 1e-6


def test_a_graph_with_a_cycle_is_drawn_too():
    layout = lay_out(3, [(0, 1), (1, 2), (2, 1)])
    assert [way[0][0] for way in layout.ways] == [layout.layers[source] for source in (0, 1, 2)]


def test_parts_are_one_node_that_says_how_many():
    drawing = draw_lineage(pipeline(37))
    root = ElementTree.fromstring(drawing.svg)
    kinds = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "kind"]
    assert sorted(kinds) == sorted(
        ["trace_snapshot", "run", "model", "prompts", "run", "37 trace_fragments", "37 runs"]
    )
    assert [len(group) for group in drawing.groups].count(37) == 2
    # As many nodes however many parts there are.
    assert len(draw_lineage(pipeline(500)).groups) == len(drawing.groups)


def test_parts_with_another_past_are_apart():
    nodes = [node("policy_set-1", "policy_set"), run("run-1", "train"), run("run-2", "train-heads")]
    nodes += [run("run-3", "train-heads"), node("head_group-2", "head_group"), node("head_group-3", "head_group")]
    nodes += [node("model-1", "model")]
    pairs = [
        ("run-1", "policy_set-1", "policy"),
        ("head_group-2", "run-1", "group_0"),
        ("head_group-3", "run-1", "group_1"),
    ]
    pairs += [("run-2", "head_group-2", "group"), ("run-3", "head_group-3", "group")]
    alike = graph("policy_set-1", nodes[:-1], pairs)
    apart = graph("policy_set-1", nodes, [*pairs, ("model-1", "run-3", "model")])
    assert sorted(len(group) for group in group_alike(alike).groups) == [1, 1, 2, 2]
    assert {len(group) for group in group_alike(apart).groups} == {1}


def test_kinds_differ_in_shape_and_colour_and_word():
    kinds = ["model", "prompts", "trace_snapshot", "policy_set", "evaluation"]
    looks = {}
    for kind in kinds:
        root = ElementTree.fromstring(draw_lineage(graph("a-1", [node("a-1", kind)], [])).svg)
        (shape,) = (path for path in root.iter(f"{SVG}path") if path.get("class") == "shape")
        looks[kind] = (shape.get("d"), shape.get("fill"), next(root.iter(f"{SVG}text")).text)
    for aspect in range(3):
        assert len({look[aspect] for look in looks.values()}) == len(kinds)


def look_of(kind: str) -> tuple[str, str]:
    root = ElementTree.fromstring(draw_lineage(graph("a-1", [node("a-1", kind)], [])).svg)
    (shape,) = (path for path in root.iter(f"{SVG}path") if path.get("class") == "shape")
    return shape.get("d") or "", shape.get("fill") or ""


def test_a_kind_that_is_listed_nowhere_has_a_look_of_its_own_and_parts_have_that_of_their_whole():
    assert look_of("calibration") == look_of("calibration")
    assert look_of("calibration")[1] != look_of("threshold_table")[1]
    whole, part = look_of("trace_snapshot"), look_of("trace_fragment")
    assert whole[0] == part[0]
    light, dark = (sum(int(fill[i : i + 2], 16) for i in (1, 3, 5)) for _, fill in (part, whole))
    assert light > dark


def test_failed_runs_say_so():
    drawing = draw_lineage(graph("run-1", [run("run-1", "train", "failed")], []))
    root = ElementTree.fromstring(drawing.svg)
    assert next(root.iter(f"{SVG}text")).text == "run, failed"
    assert any("failed" in (each.get("class") or "") for each in root.iter(f"{SVG}g"))


def test_labels_fit_their_shapes():
    root = ElementTree.fromstring(draw_lineage(pipeline(3, title="many words " * 30 + "x" * 200)).svg)
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert max(map(len, texts)) < 32
    for each in root.iter(f"{SVG}g"):
        assert len(each.findall(f"{SVG}text")) <= 4


@pytest.mark.parametrize("count", [1, 3])
def test_names_cannot_break_the_drawing(count: int):
    svg = draw_lineage(pipeline(count, title=HOSTILE)).svg
    root = ElementTree.fromstring(svg)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {"svg", "title", "style", "g", "path", "text"}
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert sum(HOSTILE in title for title in titles) == 4  # the drawing's own, snapshot, model, and the fragments


class Page(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, str] = {}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs
        self._inside = dict(attrs).get("id") or tag

    def handle_data(self, data: str) -> None:
        self.texts[self._inside] = self.texts.get(self._inside, "") + data


@pytest.mark.parametrize("title", ["plain", HOSTILE])
def test_the_page_holds_every_record_and_nothing_from_elsewhere(title: str):
    shown = pipeline(5, title=title)
    text = render_lineage_page(shown)
    page, plain = Page(text), Page(render_lineage_page(pipeline(5)))
    del page.tags["text"], plain.tags["text"]  # longer names take more lines
    assert page.tags == plain.tags  # no name has become an element
    assert page.tags["script"] == 2
    records = json.loads(page.texts["records"])
    found = {record["id"]: record for group in records for record in group}
    assert {name: record["name"] for name, record in found.items()} == {
        name: each.name for name, each in shown.nodes.items()
    }
    assert found["run-0"]["inputs"] == {"model": "model-1", "prompts": "prompts-1", "code": "code-1"}
    assert found["run-0"]["outputs"] == {"fragment": "trace_fragment-0"}
    places = [int(value or "") for name, value in page.attributes if name == "data-group"]
    assert places == list(range(len(records)))
    assert not [name for name, _ in page.attributes if name in ("src", "href", "srcset", "onload", "onclick")]
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text and "url(" not in text
