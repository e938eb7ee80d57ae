"""The report in a real browser: every figure is drawn, nothing is fetched and nothing goes wrong."""

from pathlib import Path

from dashboards.figures.drawing import Figure
from dashboards.report.writing import make_report, write_report
from tests.browser import open_browser


def test_every_figure_is_drawn_from_the_file_alone(planted, folder: Path, tmp_path: Path):
    page_path, _ = write_report(planted.rows, folder)
    figures = [b for section in make_report(planted.rows).sections for b in section.blocks if isinstance(b, Figure)]
    wrong: list[str] = []
    with open_browser(tmp_path / "profile") as context:
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda shown: wrong.append(shown.text) if shown.type in ("error", "warning") else None)
        page.on("request", lambda asked: wrong.append(asked.url) if asked.url.startswith("http") else None)
        page.goto(page_path.as_uri())
        page.wait_for_selector(f":nth-match(.plot .main-svg:first-child, {len(figures)})")
        assert page.locator(".plot .main-svg:first-child").count() >= len(figures)
        assert page.locator(".plot:not(.js-plotly-plot)").count() == 0
        assert (
            page.locator(".heatmaplayer image").count() >= 5 and page.locator(".plot .boxlayer path.box").count() == 4
        )
    assert not wrong
