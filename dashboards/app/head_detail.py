"""One KV head: how its policy learned, how the future's attention is spread, and how a method ranks its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dashboards.app.content import Nothing
from dashboards.app.kept_tokens import NUM_RECENT_TOKENS, NUM_SINK_TOKENS, ORACLE, HeadChoice, shares_by_budget
from dashboards.app.records import Evaluation, ListedContext, Records
from dashboards.app.selection import Selection
from dashboards.figures.drawing import GREY, Figure, linear_axis, log_axis, new_drawing
from dashboards.figures.styles import style_of
from dashboards.rendering.formats import number
from kvpolicy.names import LEARNED
from storage.token_ranks import StoredContext

RANK = "kvp evaluate --set evaluate.num_ranked=1"
UNRANKED = "This evaluation kept no rankings token by token, which one that evicts after every chunk never does."
_MOST_CONTEXTS, _MOST_POINTS = 12, 3000
_LIMIT = {"color": GREY, "dash": "dot"}
_SEED_DASHES = ("solid", "dash", "dot", "dashdot")
_KINDS = (
    ("kept by both", "#7b8794", "circle"),
    ("wrongly dropped", "#c62828", "x"),
    ("wrongly kept", "#1f6fb2", "diamond"),
    ("dropped by both", "#cfd6df", "circle"),
)


@dataclass(frozen=True, kw_only=True)
class ShownHead:
    """A head that is shown.

    Attributes:
        name: such as L03.H1.
        head: its place in the order of heads.
        setting: of the contexts that are shown.
        method: that is compared with the oracle.
    """

    name: str
    head: int
    setting: str
    method: str


def head_figures(
    records: Records, evaluation: Evaluation, selection: Selection, shown: ShownHead
) -> list[Figure | Nothing]:
    """The figures of a head; in place of a missing one, the command that makes it.

    Args:
        records: of the home.
        evaluation: the one that is chosen.
        selection: asked for the sample and the budget.
        shown: the head.
    """
    name, head, method = shown.name, shown.head, shown.method
    figures: list[Figure | Nothing] = [_training(records, records.policy_sets(evaluation), name)]
    contexts = [context for context in records.contexts(evaluation) if context.setting == shown.setting]
    if not contexts:
        return [*figures, Nothing(UNRANKED, RANK)]
    samples = [(context.sample_id, f"{context.task}: {context.sample_id}") for context in contexts]
    sample = selection.one("sample", "Sample", samples)
    chosen = next(context for context in contexts if context.sample_id == sample)
    figures.append(_importance(records, contexts[:_MOST_CONTEXTS], name, head))
    seeds = [seed for name_of_method, seed in chosen.rankings if name_of_method == method]
    if not seeds:
        return [*figures, Nothing(f"{method} does not rank tokens, so there is nothing to compare.", "")]
    budget = int(selection.one("budget", "Budget", map(str, chosen.budgets)))
    context = records.context(chosen, [(method, seeds[0]), ORACLE])
    ranking = context.find(method, seeds[0]) if context else None
    if context is None or ranking is None:
        return [*figures, Nothing(f"The ranking of {sample} by {method} is lost.", RANK)]
    choice = HeadChoice.of(context, ranking, head=head, budget=budget)
    against = _against_oracle(context, choice, name, (method, seeds[0]), budget)
    return [*figures, against, _kept_attention(choice, name, method)]


def _training(records: Records, policy_sets: Sequence[str], name: str) -> Figure | Nothing:
    drawing = new_drawing(legend_above=True, xaxis=linear_axis("training step"))
    values: list[float] = []
    for place, policy_set in enumerate(policy_sets):
        of_head = [row for row in records.of_policy_set("head_curves", policy_set) if row["head_name"] == name]
        mean = [row for row in records.of_policy_set("metrics", policy_set) if row["name"] == "heldout_cost"]
        dash, seed = _SEED_DASHES[place % len(_SEED_DASHES)], f", policy set {place + 1}" * (len(policy_sets) > 1)
        for words, rows, column, colour in (
            (f"{name}{seed}", of_head, "heldout_cost", style_of(LEARNED).colour),
            (f"mean of all heads{seed}", mean, "value", GREY),
        ):
            if rows:
                ordered = sorted(rows, key=lambda row: row["step"])
                costs = [row[column] for row in ordered]
                values += costs
                drawing.add_scatter(
                    name=words,
                    x=[row["step"] for row in ordered],
                    y=costs,
                    mode="lines+markers",
                    line={"color": colour, "dash": dash},
                    hovertemplate="step %{x}: %{y:.4g}",
                )
    if not values:
        return Nothing(f"How {name} learned is not in the catalog.", "kvp train")
    drawing.update_layout(yaxis=log_axis("held-out cost (1 is optimal)", values))
    return Figure(
        name="training",
        title=f"How {name} learned",
        drawing=drawing,
        label=f"Line chart of the held-out cost of {name} and of the mean of all heads against training steps; at the "
        f"end {number(values[-1])}.",
        height=340,
        note="Normalised eviction cost on traces that no policy was trained on.",
    )


def _importance(records: Records, contexts: Sequence[ListedContext], name: str, head: int) -> Figure:
    drawing = new_drawing(showlegend=len(contexts) > 1, legend={"font": {"size": 11}})
    drawn, seen, longest = 0, [1.0], 1
    for listed in contexts:
        context = records.context(listed, [])
        shares = np.sort(context.importance[head].astype(float))[::-1] if context else np.empty(0)
        shares = shares[shares > 0] / max(shares.sum(), 1e-30)
        if not len(shares):
            continue
        drawing.add_scatter(
            name=listed.task,
            x=list(range(1, len(shares) + 1)),
            y=shares.tolist(),
            mode="lines",
            hovertemplate="rank %{x}: %{y:.2g}<extra>" + listed.task + "</extra>",
        )
        drawn, longest = drawn + 1, max(longest, len(shares))
        seen += [float(shares[0]), float(shares[-1])]
    drawing.update_layout(
        xaxis=log_axis("rank by importance", [1, longest]), yaxis=log_axis("share of the future attention", seen[1:])
    )
    return Figure(
        name="importance",
        title=f"Importance of tokens to {name}",
        drawing=drawing,
        label=f"Line chart, logarithmic both ways, of the attention share of tokens in descending order; {drawn} "
        "samples.",
        height=340,
        note="One line a sample: what its tokens receive from the future, in descending order. A steep line means that "
        "few tokens matter.",
    )


def _against_oracle(
    context: StoredContext, choice: HeadChoice, name: str, contender: tuple[str, int], budget: int
) -> Figure:
    method, seed = contender
    drawing = new_drawing(
        legend_above=True,
        legend={"font": {"size": 11}},
        xaxis=log_axis("rank under the oracle", [1, len(choice.ranks)]),
        yaxis=log_axis(f"rank under {method}", [1, len(choice.ranks)]),
    )
    groups = (choice.kept & choice.best, choice.wrongly_dropped, choice.wrongly_kept, ~choice.kept & ~choice.best)
    thinned = max(1, -(-len(choice.ranks) // _MOST_POINTS))
    for (words, colour, symbol), group in zip(_KINDS, groups, strict=True):
        places = np.flatnonzero(group)[::thinned]
        drawing.add_scatter(
            name=f"{words} ({int(group.sum())})",
            x=choice.best_ranks[places].tolist(),
            y=choice.ranks[places].tolist(),
            text=[context.pieces[place].replace("<", "‹").replace("\n", "↵") for place in places],
            mode="markers",
            marker={"color": colour, "symbol": symbol, "size": 5},
            hovertemplate="“%{text}”: %{y}, oracle %{x}<extra></extra>",
        )
    limit = choice.num_kept + 0.5
    drawing.add_vline(x=limit, line=_LIMIT)
    drawing.add_hline(y=limit, line=_LIMIT)
    dropped = int(choice.wrongly_dropped.sum())
    return Figure(
        name="ranking",
        title=f"{name}: {method} against the oracle",
        drawing=drawing,
        label=f"Scatter chart of {len(choice.ranks)} tokens by their ranks under the oracle and under {method}. With "
        f"{choice.num_kept} tokens kept, {dropped} are wrongly dropped.",
        height=400,
        note=f"Each mark is a token of the sample; dotted: what the head keeps at a budget of {budget}"
        + (f" ({choice.num_kept} tokens)" if choice.num_kept != budget else "")
        + (f". Seed {seed}" if seed else "")
        + (f". One in {thinned} tokens is drawn" if thinned > 1 else ""),
    )


def _kept_attention(choice: HeadChoice, name: str, contender: str) -> Figure:
    first = NUM_SINK_TOKENS + NUM_RECENT_TOKENS
    counts = np.arange(1, len(choice.ranks) + 1)
    shown = np.unique(np.geomspace(min(first, len(counts)), len(counts), 200).astype(int))
    drawing = new_drawing(
        legend_above=True,
        xaxis=log_axis("tokens that the head keeps", shown.tolist()),
        yaxis={"title": {"text": "share of the future attention kept"}, "range": [0, 1.03]},
    )
    for method, ranks in ((contender, choice.ranks), ("oracle", choice.best_ranks)):
        shares, style = shares_by_budget(ranks, choice.importance), style_of(method)
        drawing.add_scatter(
            name=method,
            x=shown.tolist(),
            y=shares[shown - 1].tolist(),
            mode="lines",
            line={"color": style.colour, "dash": style.dash, "width": 2},
            hovertemplate="%{x} tokens: %{y:.1%}",
        )
    drawing.add_vline(x=choice.num_kept, line=_LIMIT)
    return Figure(
        name="attention",
        title=f"{name}: future attention that is kept",
        drawing=drawing,
        label=f"Line chart of the share of attention kept against tokens kept, under {contender} and the oracle; "
        f"with {choice.num_kept} tokens {choice.share_kept:.0%} and {choice.best_share:.0%}.",
        height=400,
        note=f"With {choice.num_kept} tokens: {contender} {choice.share_kept:.1%}, oracle {choice.best_share:.1%}.",
    )
