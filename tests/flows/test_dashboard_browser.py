"""`kvp dashboard` in a real browser, on a home that a small run made: what is drawn, chosen, clicked and downloaded.

Screenshots of every page at two widths are left in tests/output/dashboard, to be looked at.
"""

import csv
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from processes import environment, start_process, stop_process, tail

from storage.catalog.catalog import Catalog
from storage.home import Home
from tests.browser import open_browser

OUTPUT = Path(__file__).parents[1] / "output" / "dashboard"
PAGES = {
    "curves": "/curves",
    "heads": "/heads?head=2",
    "tokens": "/tokens?budget=64",
    "similarity": "/similarity",
    "lineage": "/lineage",
    "lineage-of-evaluation": "/lineage?id={evaluation}",
    "runs": "/runs",
}
Open = Callable[[str], Any]


@pytest.fixture(scope="module")
def home(small_run) -> Home:
    return Home.open(small_run.home)


@pytest.fixture(scope="module")
def url(small_run, tmp_path_factory) -> Iterator[str]:
    """Where the command says that it is; after an interrupt it has ended well and said nothing else."""
    log = tmp_path_factory.mktemp("dashboard") / "log"
    command = ["kvp", "dashboard", "--port", "0", "--home", str(small_run.home)]
    process = start_process(command, log=log, env=environment())
    deadline = time.monotonic() + 60
    while not log.read_text().endswith("\n"):
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"kvp dashboard did not start; it said: {tail(log)}", pytrace=False)
        time.sleep(0.1)
    (found,) = log.read_text().split()
    yield found
    stop_process(process)
    assert (process.returncode, log.read_text().split()) == (0, [found])


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("chromium") / "profile") as context:
        yield context


@pytest.fixture
def open_page(browser, url) -> Iterator[Open]:
    """Opens a page once all of it is drawn; no page may fetch from elsewhere or report an error."""
    page, wrong = browser.new_page(), []
    page.set_default_timeout(15_000)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.on("request", lambda asked: None if asked.url.startswith((url, "data:", "blob:")) else wrong.append(asked.url))

    def opened(path: str) -> Any:
        page.goto(url + path)
        wait_until_drawn(page)
        return page

    yield opened
    page.close()
    assert not wrong


@pytest.fixture(scope="module")
def evaluation(home) -> dict[str, Any]:
    (found,) = Catalog(home).rows("artifacts", "kind = 'evaluation'")
    return found


@pytest.fixture(scope="module")
def curve_rows(home) -> list[dict[str, Any]]:
    """The points that the page of curves begins with."""
    return Catalog(home).rows("curves", "task = 'mean' AND metric = 'kl' AND setting = 'query_agnostic'")


def wait_until_drawn(page: Any) -> None:
    """Wait for all figures; what a page may run keeps playwright from waiting for conditions in JavaScript."""
    page.wait_for_selector(".plot:not([data-drawn])", state="detached")


def wait_for(page: Any, path: str = "", **choices: list[str]) -> None:
    """Wait for the page that a choice has asked for, by what its URL chooses, and for its figures."""

    def is_there(url: str) -> bool:
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        return parts.path.endswith(path) and all(query.get(name, []) == values for name, values in choices.items())

    page.wait_for_url(is_there)
    wait_until_drawn(page)


def texts(page: Any, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_text_contents()]


def test_curves_are_drawn_with_their_bands_and_follow_the_choices(open_page, curve_rows):
    page = open_page("/curves")
    methods = {row["method"] for row in curve_rows} - {"full"}
    budgets = sorted({row["budget"] for row in curve_rows})
    traces = "#plot-curves .scatterlayer .trace"
    assert page.locator(traces).count() == 2 * len(methods)  # a band and a line each
    assert page.locator(f"{traces} .fills path, {traces} .js-fill").count() >= len(methods)
    assert set(texts(page, "#plot-curves .legendtext")) == methods
    assert texts(page, "#plot-curves .xaxislayer-above text") == [str(budget) for budget in budgets]
    with_markers = methods - {"oracle"}
    assert page.locator(f"{traces} .points path").count() == len(with_markers) * len(budgets)
    assert page.locator("#plot-differences .scatterlayer .trace").count() >= len(methods)

    boxes = [box.get_attribute("value") for box in page.locator("[data-several=method] input").all()]
    page.get_by_label("snapkv").uncheck()
    wait_for(page, method=[name for name in boxes if name != "snapkv"])
    assert page.locator(traces).count() == 2 * len(methods) - 2
    page.get_by_label("Budget axis", exact=True).select_option("linear")
    wait_for(page, scale=["linear"])
    chosen = page.url
    again = open_page(chosen.removeprefix(page.evaluate("location.origin")))
    assert again.locator(traces).count() == 2 * len(methods) - 2
    assert again.evaluate("document.getElementById('plot-curves').layout.xaxis.type") == "linear"
    assert not again.get_by_label("snapkv").is_checked()


def test_going_back_shows_what_was_chosen_before(open_page):
    page = open_page("/curves")
    page.get_by_label("Setting", exact=True).select_option("query_aware")
    wait_for(page, setting=["query_aware"])
    page.go_back()
    wait_for(page, setting=[])
    page.wait_for_selector("#menu-setting option[value=query_agnostic][selected]", state="attached")
    page.get_by_role("link", name="Runs").click()
    wait_for(page, "/runs")
    assert page.title() == "Runs · kvpolicy"


def test_figures_and_numbers_are_downloaded(open_page, curve_rows, tmp_path):
    page = open_page("/curves?method=kvp&method=knorm")

    def download(name: str) -> bytes:
        with page.expect_download() as found:
            page.locator("#card-curves .tools").get_by_text(name).click()
        assert found.value.suggested_filename == f"curves.{name.lower()}"
        found.value.save_as(tmp_path / name)
        return (tmp_path / name).read_bytes()

    assert download("PNG")[:8] == b"\x89PNG\r\n\x1a\n"
    svg = download("SVG").decode()
    assert svg.startswith("<svg")
    assert ">kvp</text>" in svg
    assert svg.count('class="trace scatter') == 4
    rows = list(csv.DictReader(download("CSV").decode().splitlines()))
    planted = {(row["method"], row["budget"]): row["value"] for row in curve_rows}
    assert {(row["method"], int(row["budget"])): float(row["value"]) for row in rows} == {
        key: pytest.approx(value) for key, value in planted.items() if key[0] in ("kvp", "knorm")
    }


def test_a_click_on_a_head_shows_its_training_importance_and_ranking(open_page, home):
    page = open_page("/heads")
    assert page.locator("#plot-costs .hm image").count() == 1
    assert texts(page, "#plot-costs .xaxislayer-above text") == ["0", "1", "2"]
    assert texts(page, "#plot-costs .yaxislayer-above text") == ["H0", "H1"]
    costs = page.evaluate("document.getElementById('plot-costs').data[0].z.flat()")
    assert len(costs) == 6
    box = page.locator("#plot-costs .nsewdrag").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 4)  # the middle layer's first head
    wait_for(page, head=["2"])
    assert page.locator("#detail h2").inner_text() == "L01.H0"
    steps = {row["step"] for row in Catalog(home).rows("head_curves")}
    assert page.locator("#plot-training .points path").count() == 2 * len(steps)  # the head, and the mean of all
    tokens = page.evaluate("document.getElementById('plot-importance').data[0].x.length")
    assert page.locator("#plot-ranking .points path").count() >= tokens
    assert set(texts(page, "#plot-attention .legendtext")) == {"kvp", "oracle"}


def test_tokens_are_shaded_and_a_larger_budget_keeps_more(open_page):
    page = open_page("/tokens?head=3&budget=64")
    text = page.locator("#ranked").inner_text()
    count = page.locator("#ranked span").count()
    assert "special magic" in text
    assert page.locator("#attended span").count() == count
    assert page.locator("#ranked span.kept").count() == 64
    dropped = page.locator("#ranked span.gone.dropped").count()
    assert page.locator("#attended span.dropped").count() == dropped == page.locator("#ranked span.kept.extra").count()
    colours = {
        page.locator(f"#ranked span.{name}").first.evaluate("(own) => getComputedStyle(own).backgroundColor")
        for name in ("r9", "r1", "gone")
    }
    assert len(colours) == 3
    page.get_by_label("Budget", exact=True).select_option("128")
    wait_for(page, budget=["128"])
    assert page.locator("#ranked span.kept").count() == 128
    page.get_by_label("Method", exact=True).select_option("oracle.0")
    wait_for(page, contender=["oracle.0"])
    assert page.locator("#ranked span.dropped").count() == 0


def test_heads_are_clustered(open_page, home):
    page = open_page("/similarity")
    names = {row["head_name"] for row in Catalog(home).rows("heads")}
    assert page.locator("#plot-similarity .hm image").count() == 1
    assert set(texts(page, "#plot-similarity .xaxislayer-above .xtick text")) == names
    branches = page.locator("#plot-similarity .scatterlayer .trace .lines path")
    assert branches.count() == len(names) - 1  # each joins two
    page.get_by_label("Order", exact=True).select_option("layers")
    wait_for(page, order=["layers"])
    assert texts(page, "#plot-similarity .xaxislayer-above .xtick text") == sorted(names)
    assert page.locator("#plot-similarity .scatterlayer .trace").count() == 0


def test_lineage_is_walked_from_an_evaluation_to_its_model_and_back(open_page, evaluation, home):
    page = open_page(f"/lineage?id={evaluation['artifact_id']}&steps=all")
    nodes = page.locator(".walk .node").count()
    assert nodes > 8
    assert page.locator(".walk .flow").count() >= nodes - 1
    (model,) = Catalog(home).rows("models")
    page.locator(".walk .node", has_text=model["model_id"]).click()
    wait_for(page, id=[model["model_id"]])
    assert model["digest"] in page.locator("#record").inner_text()
    page.locator("#record a", has_text="collect run-").first.click()
    collected = [run["run_id"] for run in Catalog(home).rows("runs", "stage = 'collect'")]
    wait_for(page, id=collected)
    assert "outcome" in page.locator("#record").inner_text()
    page.get_by_label("Direction", exact=True).select_option("down")
    wait_for(page, way=["down"], id=collected)
    page.go_back()
    wait_for(page, way=["around"], id=collected)
    page.go_back()
    wait_for(page, id=[model["model_id"]])


def test_runs_lead_to_their_lineage(open_page, home):
    page = open_page("/runs")
    runs = Catalog(home).rows("runs")
    assert page.locator("#runs tbody tr").count() == min(50, len(runs))
    assert page.locator("#plot-timeline .bars .point path").count() == min(50, len(runs))
    page.get_by_label("Stage", exact=True).select_option("train")
    wait_for(page, stage=["train"])
    own = [run for run in runs if run["stage"] == "train"]
    assert page.locator("#runs tbody tr").count() == len(own)
    page.locator("#runs tbody a").first.click()
    wait_for(page, "/lineage")
    assert page.locator("#record h2").inner_text() == f"run {own[-1]['run_id']}"


@pytest.mark.parametrize("name", PAGES)
def test_pages_fit_their_window_also_when_it_shrinks(open_page, evaluation, name):
    page = open_page(PAGES[name].format(evaluation=evaluation["artifact_id"]))
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for width in (1280, 800):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(300)  # figures follow a window that has come to rest
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        plots = "Array.from(document.querySelectorAll('.plot'))"
        wide = "(plot) => plot.querySelector('svg').clientWidth > plot.clientWidth + 1"
        assert page.evaluate(f"{plots}.filter({wide}).map((plot) => plot.id)") == []
        page.screenshot(path=OUTPUT / f"{name}-{width}.png", full_page=True)


def test_without_a_server_the_page_says_so(browser, url):
    page = browser.new_page()
    page.goto(f"{url}/curves")
    wait_until_drawn(page)
    page.route("**/*", lambda route: route.abort())
    page.get_by_role("link", name="Runs").click()
    assert "no longer answers" in page.locator(".notice.of-script").inner_text()
    page.unroute_all()
    page.close()
