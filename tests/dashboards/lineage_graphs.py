"""Lineage graphs for the tests of their drawings: of a small pipeline, and any."""

from hypothesis import strategies as st

from storage.lineage.graph import LineageEdge, LineageGraph, LineageNode

HOSTILE = """<script>alert(1)</script> & "quotes" 'n' ]]> </title></script><!-- é\u2028"""


def node(name: str, kind: str, title: str = "", **facts: object) -> LineageNode:
    return LineageNode(id=name, kind=kind, name=title or name, facts=facts)


def run(name: str, stage: str, outcome: str = "completed") -> LineageNode:
    return node(name, "run", stage, outcome=outcome)


def graph(root: str, nodes: list[LineageNode], pairs: list[tuple[str, str, str]]) -> LineageGraph:
    """A graph of (source, target, name) flows."""
    found = {each.id: each for each in nodes}
    edges = tuple(
        LineageEdge(source=source, target=target, role="output" if found[source].kind == "run" else "input", name=name)
        for source, target, name in pairs
    )
    return LineageGraph(root=root, direction="up", nodes=found, edges=edges)


def pipeline(num_fragments: int = 37, title: str = "") -> LineageGraph:
    """A model read by every run; prompts; fragments, each from a run of its own; and the snapshot of them all."""
    nodes = [node("snapshot-1", "trace_snapshot", title), run("run-seal", "collect"), node("model-1", "model", title)]
    nodes += [node("prompts-1", "prompts"), run("run-prompts", "prompts"), node("code-1", "code")]
    pairs = [("run-seal", "snapshot-1", "snapshot"), ("model-1", "run-seal", "model"), ("code-1", "run-seal", "code")]
    pairs += [("model-1", "run-prompts", "model"), ("run-prompts", "prompts-1", "prompts")]
    for index in range(num_fragments):
        nodes += [node(f"trace_fragment-{index}", "trace_fragment", title), run(f"run-{index}", "collect-fragment")]
        pairs += [("model-1", f"run-{index}", "model"), ("prompts-1", f"run-{index}", "prompts")]
        pairs += [(f"run-{index}", f"trace_fragment-{index}", "fragment"), ("code-1", f"run-{index}", "code")]
        pairs += [(f"trace_fragment-{index}", "run-seal", f"fragment_{index:05d}")]
    return graph("snapshot-1", nodes, pairs)


@st.composite
def graphs(draw: st.DrawFn) -> LineageGraph:
    """Any artifacts and runs, each run after what it reads."""
    artifacts = [node("model-0", "model")]
    nodes, pairs = list(artifacts), []
    for number in range(draw(st.integers(0, 12))):
        of = run(f"run-{number}", draw(st.sampled_from("ab")), draw(st.sampled_from(["completed", "failed"])))
        nodes.append(of)
        for source in draw(st.lists(st.sampled_from(artifacts), max_size=4, unique_by=lambda each: each.id)):
            pairs.append((source.id, of.id, draw(st.sampled_from(["model", "part_1", "part_2"]))))
        for place in range(draw(st.integers(0, 2))):
            made = node(f"x-{number}-{place}", draw(st.sampled_from(["curve", "prompts", "code", "new kind"])))
            artifacts.append(made)
            nodes.append(made)
            pairs.append((of.id, made.id, f"part_{place}"))
    return graph(draw(st.sampled_from(nodes)).id, nodes, pairs)
