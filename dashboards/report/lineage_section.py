"""Section: ids of all curves, and how to trace and repeat the evaluation."""

from collections.abc import Iterator

from dashboards.figures.styles import method_order
from dashboards.lineage.groups import is_part
from dashboards.rendering.table import table
from dashboards.report.document import Block, prose
from dashboards.report.view import ReportView, section


@section("lineage", "Lineage")
def lineage_section(view: ReportView) -> Iterator[Block]:
    """Ids of every curve, of the evaluated artifacts and of their sources."""
    rows = view.rows
    curves = {(row["benchmark"], row["setting"], row["method"], row["seed"]): row for row in rows.curves}
    ordered = sorted(curves.items(), key=lambda item: (*item[0][:2], method_order(item[0][2]), item[0][3]))
    yield prose(
        f"`kvp lineage {rows.evaluation_id} --out origin.html` draws what this evaluation came from, `kvp rerun "
        f"{rows.run_id}` runs it again and compares, and `kvp sql` answers further questions; docs/metrics.md "
        "defines every metric."
    )
    yield table(
        "Every curve",
        ("benchmark", "setting", "method", "seed", "curve", "MLflow run", "made from"),
        [(*map(str, name), row["curve_id"], row["mlflow_run_id"], row["policy_set_id"]) for name, row in ordered],
        num_labels=7,
    )
    yield table(
        "What it all came from",
        ("kind", "id", "name", "digest"),
        [
            (node.kind, node.id, node.name, str(node.facts["digest"]))
            for node in sorted(rows.graph.nodes.values(), key=lambda node: (node.kind, node.id))
            if node.kind not in ("run", "environment") and not is_part(node.kind)
        ],
        num_labels=4,
    )
