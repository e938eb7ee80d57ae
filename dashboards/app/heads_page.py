"""Page: cost of each KV head under a method, its gain over the best heuristic, and one head in detail."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from dashboards.app.choosing import choose_evaluation, choose_place, lineage_link, origin
from dashboards.app.content import Nothing, Page
from dashboards.app.head_detail import ShownHead, head_figures
from dashboards.app.records import Evaluation, Records
from dashboards.app.selection import Selection, page_url
from dashboards.figures.drawing import Figure
from dashboards.figures.head_maps import SHAPES, HeadMap, Heads, cost_map, costs_by_method, draw_maps, ratio_colours
from dashboards.figures.styles import heuristics
from dashboards.rendering.formats import number
from dashboards.rendering.table import Cell, table

BEST = "best"
_NONE = (math.nan, "")
Costs = Mapping[str, Sequence[float]]
"""Method to its cost of each head, mean over seeds; NaN where a head has none."""


def heads_page(records: Records, selection: Selection) -> Page:
    """The page.

    Raises:
        Nothing: there is no evaluation, or none with costs of heads.
    """
    evaluation = choose_evaluation(records, selection)
    rows = records.head_costs(evaluation)
    if not rows:
        raise Nothing("What each head costs is not in the catalog.", "kvp evaluate")
    rows = choose_place(selection, rows)
    heads = Heads.of_rows(rows)
    costs = {name: values.tolist() for name, values in costs_by_method(rows, heads).items()}
    rivals = heuristics(rows)
    method = selection.one("method", "Method", costs)
    baselines: list[str | tuple[str, str]] = [
        (BEST, "the best heuristic of each head"),
        *(name for name in rivals if name != method),
    ]
    baseline = selection.one("baseline", "Against", baselines)
    options = [("", "none"), *((str(head), name) for head, name in enumerate(heads.names))]
    head = selection.one("head", "Head", options)
    chosen = int(head) if head else None
    against = _baseline(costs, [name for name in rivals if name != method], baseline)
    maps = [_cost_map(method, costs[method])]
    if against is not None:
        words = "the best heuristic" if baseline == BEST else baseline
        maps.append(_gain_map(method, costs[method], words, against))
    figures = [
        Figure(drawing=draw_maps(heads, [shown], chosen=chosen), height=heads.height, choice="head", **words)
        for shown, words in maps
    ]
    detail = None
    if chosen is not None:
        shown_head = ShownHead(name=heads.names[chosen], head=chosen, setting=rows[0]["setting"], method=method)
        detail = _detail(records, evaluation, selection, shown_head, costs)
    return Page(
        template="heads.html",
        content={
            "title": "Heads",
            "lead": "The importance that a ranking loses, summed over all budgets, over that of the best ranking: 1 is "
            "optimal.",
            "figures": figures,
            "hint": "" if detail else "Click a head, or choose one above, for its training, importance and ranking.",
            "detail": detail,
            "origin": origin(evaluation, records.policy_sets(evaluation)),
        },
    )


def _baseline(costs: Costs, rivals: Sequence[str], chosen: str) -> list[tuple[float, str]] | None:
    """The baseline of each head: (cost, method); None where there is no heuristic."""
    names = rivals if chosen == BEST else [chosen]
    if not names:
        return None
    of_heads = zip(*(costs[name] for name in names), strict=True)
    return [
        min(((cost, name) for cost, name in zip(of_head, names, strict=True) if not math.isnan(cost)), default=_NONE)
        for of_head in of_heads
    ]


def _cost_map(method: str, costs: Sequence[float]) -> tuple[HeadMap, dict[str, Any]]:
    """A map, and the words of its figure."""
    known = [cost for cost in costs if not math.isnan(cost)]
    words = "none of them known"
    if known:
        words = f"from {number(min(known))} to {number(max(known))}, median {number(median(known))}"
    return cost_map(costs), {
        "name": "costs",
        "title": f"Cost of each head under {method}",
        "label": f"Heat map over layers and KV heads of the cost under {method}: {words}.",
        "note": f"{len(known)} heads, {words}. Colours are logarithmic.",
    }


def _gain_map(
    method: str, costs: Sequence[float], words: str, against: Sequence[tuple[float, str]]
) -> tuple[HeadMap, dict[str, Any]]:
    """A map, and the words of its figure."""
    gains = [other / cost for cost, (other, _) in zip(costs, against, strict=True)]
    logs = [math.log10(gain) for gain in gains]
    texts = [
        f"{number(gain)}× the cost under {name}<br>{name} {number(other)}, {method} {number(cost)}"
        for gain, cost, (other, name) in zip(gains, costs, against, strict=True)
    ]
    known = [gain for gain in gains if not math.isnan(gain)]
    won = sum(gain > 1 for gain in known)
    return HeadMap(values=logs, texts=texts, colours=ratio_colours(logs)), {
        "name": "gains",
        "title": f"Gain of {method} over {words}",
        "label": f"Heat map over layers and KV heads: {method} costs less in {won} of {len(known)} heads.",
        "note": f"The other's cost divided by that of {method}: above 1× {method} costs less, which it does in {won} "
        f"of {len(known)} heads; median {number(median(known) if known else None)}×.",
    }


def _detail(
    records: Records, evaluation: Evaluation, selection: Selection, shown: ShownHead, costs: Costs
) -> dict[str, object]:
    """One head in detail."""
    name, head = shown.name, shown.head
    facts: list[tuple[Cell, ...]] = [
        (lineage_link(policy_set), number(row["heldout_cost"]), *(number(row[shape]) for shape in SHAPES))
        for policy_set in records.policy_sets(evaluation)
        for row in records.of_policy_set("heads", policy_set)
        if row["head_name"] == name
    ]
    ordered = sorted(costs, key=lambda method: costs[method][head])
    return {
        "name": name,
        "close": selection.url("heads", head=None),
        "tokens": page_url("tokens", evaluation.choices | {"head": head}),
        "figures": head_figures(records, evaluation, selection, shown),
        "facts": table("", ["policy set", "held-out cost", *SHAPES.values()], facts),
        "costs": table(
            f"Cost of {name} by method",
            ["method", "cost"],
            [(method, number(costs[method][head])) for method in ordered],
            folded=True,
        ),
    }
