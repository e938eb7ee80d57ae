"""Page: what each KV head costs under a method, and what it gains over the best heuristic; one head in detail."""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from dashboards.app.choosing import choose_evaluation, choose_place, lineage_link, origin
from dashboards.app.content import Nothing, Page
from dashboards.app.head_detail import head_figures
from dashboards.app.records import Evaluation, Records
from dashboards.app.selection import Selection, page_url
from dashboards.figures.drawing import Figure
from dashboards.figures.head_maps import HeadMap, Heads, cost_map, costs_by_method, draw_maps, ratio_colours
from dashboards.figures.styles import heuristics
from dashboards.rendering.formats import number
from dashboards.rendering.table import Link, table
from dashboards.report.head_rows import SHAPES

BEST = "best"
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
    method = selection.one("method", "Method", [(name, name) for name in costs])
    baselines = [(BEST, "the best heuristic of each head"), *((name, name) for name in rivals if name != method)]
    baseline = selection.one("baseline", "Against", baselines)
    options = [("", "none"), *((str(head), name) for head, name in enumerate(heads.names))]
    head = selection.one("head", "Head", options)
    chosen = int(head) if head else None
    against = _baseline(costs, [name for name in rivals if name != method], baseline)
    figures = [_cost_map(heads, method, costs[method], chosen)]
    if against is not None:
        words = "the best heuristic" if baseline == BEST else baseline
        figures.append(_gain_map(heads, method, costs[method], words=words, against=against, chosen=chosen))
    detail = None
    if chosen is not None:
        detail = _detail(
            records,
            evaluation,
            selection,
            heads=heads,
            costs=costs,
            setting=rows[0]["setting"],
            method=method,
            chosen=chosen,
        )
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
    """What each head is compared with: (cost, method); None where there is no heuristic."""
    names = rivals if chosen == BEST else [chosen]
    if not names:
        return None
    num_heads = len(next(iter(costs.values())))
    return [
        min(((costs[name][head], name) for name in names if not math.isnan(costs[name][head])), default=(math.nan, ""))
        for head in range(num_heads)
    ]


def _cost_map(heads: Heads, method: str, costs: Sequence[float], chosen: int | None) -> Figure:
    known = [cost for cost in costs if not math.isnan(cost)]
    words = "none of them known"
    if known:
        words = f"from {number(min(known))} to {number(max(known))}, median {number(median(known))}"
    return Figure(
        name="costs",
        title=f"Cost of each head under {method}",
        drawing=draw_maps(heads, [cost_map(costs)], chosen=chosen),
        label=f"Heat map over layers and KV heads of the cost under {method}: {words}.",
        height=heads.height,
        note=f"{len(known)} heads, {words}. Colours are logarithmic.",
        choice="head",
    )


def _gain_map(
    heads: Heads,
    method: str,
    costs: Sequence[float],
    *,
    words: str,
    against: Sequence[tuple[float, str]],
    chosen: int | None,
) -> Figure:
    gains = [other / cost for cost, (other, _) in zip(costs, against, strict=True)]
    logs = [math.log10(gain) for gain in gains]
    texts = [
        f"{number(gain)}× the cost under {name}<br>{name} {number(other)}, {method} {number(cost)}"
        for gain, cost, (other, name) in zip(gains, costs, against, strict=True)
    ]
    known = [gain for gain in gains if not math.isnan(gain)]
    won = sum(gain > 1 for gain in known)
    return Figure(
        name="gains",
        title=f"Gain of {method} over {words}",
        drawing=draw_maps(heads, [HeadMap(values=logs, texts=texts, colours=ratio_colours(logs))], chosen=chosen),
        label=f"Heat map over layers and KV heads: {method} costs less in {won} of {len(known)} heads.",
        height=heads.height,
        note=f"The other's cost divided by that of {method}: above 1× {method} costs less, which it does in {won} of "
        f"{len(known)} heads; median {number(median(known) if known else None)}×.",
        choice="head",
    )


def _detail(
    records: Records,
    evaluation: Evaluation,
    selection: Selection,
    *,
    heads: Heads,
    costs: Costs,
    setting: str,
    method: str,
    chosen: int,
) -> dict[str, object]:
    """What the page shows of one head."""
    name = heads.names[chosen]
    facts: list[list[str | Link]] = []
    for policy_set in records.policy_sets(evaluation):
        for row in records.of_policy_set("heads", policy_set):
            if row["head_name"] == name:
                shapes = [number(row[shape]) for shape in SHAPES]
                facts.append([lineage_link(policy_set), number(row["heldout_cost"]), *shapes])
    ordered = sorted(costs, key=lambda method_name: costs[method_name][chosen])
    return {
        "name": name,
        "close": selection.url("heads", head=None),
        "tokens": page_url("tokens", evaluation.choices | {"head": chosen}),
        "figures": head_figures(records, evaluation, selection, name=name, head=chosen, setting=setting, method=method),
        "facts": table("", ["policy set", "held-out cost", *SHAPES.values()], facts),
        "costs": table(
            f"Cost of {name} by method",
            ["method", "cost"],
            [[method_name, number(costs[method_name][chosen])] for method_name in ordered],
            folded=True,
        ),
    }
