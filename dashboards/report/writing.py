"""The report of one evaluation: the paper's figures and tables, from this evaluation's own rows.

`write_report` writes it twice: as a page (`templates/report.html`) and as Markdown (`templates/report.md`). The
same rows give the same bytes. Each section has a module of its own, and names the data that the run lacks.
"""

from pathlib import Path

from plotly.offline import get_plotlyjs

from dashboards.figures.drawing import Figure
from dashboards.rendering.pages import render_template
from dashboards.report.curves_section import curves_section, reward_section
from dashboards.report.document import Document
from dashboards.report.evaluated_section import evaluated_section
from dashboards.report.evaluation_rows import ReportRows
from dashboards.report.findings import findings_section
from dashboards.report.heads_section import heads_section
from dashboards.report.lineage_section import lineage_section
from dashboards.report.matrix import matrix_section
from dashboards.report.training_section import training_section
from dashboards.report.view import ReportView
from dashboards.report.wins import headlines, wins_section
from storage.whole_files import write_whole

HTML_NAME, MARKDOWN_NAME = "report.html", "report.md"
_SECTIONS = (
    evaluated_section,
    wins_section,
    curves_section,
    matrix_section,
    heads_section,
    training_section,
    reward_section,
    findings_section,
    lineage_section,
)


def write_report(rows: ReportRows, folder: Path) -> list[Path]:
    """Write `report.html` and `report.md`; each is replaced in one step.

    Args:
        rows: what the catalog has of the evaluation.
        folder: where the files go; it is made if it is missing.

    Returns:
        The paths of both.

    Raises:
        ValueError: rows can't be drawn.
        OSError: the folder can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)  # first, as drawing takes a while
    document = make_report(rows)
    page, tables = render_report_page(document), render_template("report.md", document=document)
    return [write_whole(folder / HTML_NAME, page.encode()), write_whole(folder / MARKDOWN_NAME, tables.encode())]


def make_report(rows: ReportRows) -> Document:
    """The report's content.

    Raises:
        ValueError: rows can't be drawn.
    """
    view = ReportView(rows=rows)
    summary = headlines(view) or ["Nothing can be claimed from this evaluation: the section on claims says why."]
    return Document(
        title=f"Report: {rows.evaluation.name}",
        summary=(f"{rows.evaluation_id}, made by {rows.run_id}.", *summary),
        sections=tuple(make(view) for make in _SECTIONS),
    )


def render_report_page(document: Document) -> str:
    """The page as text; it holds plotly.js where there are figures to draw."""
    has_figures = any(isinstance(block, Figure) for section in document.sections for block in section.blocks)
    return render_template("report.html", document=document, plotlyjs=get_plotlyjs() if has_figures else "")
