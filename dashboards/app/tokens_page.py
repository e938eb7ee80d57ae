"""Page: a sample's text, each token shaded by a method's rank in one head, beside the attention it will receive."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dashboards.app.choosing import choose_evaluation, lineage_link, origin
from dashboards.app.content import Nothing, Page
from dashboards.app.head_detail import RANK, UNRANKED
from dashboards.app.kept_tokens import ORACLE, HeadChoice, most_selective_head
from dashboards.app.records import Evaluation, ListedContext, Records
from dashboards.app.selection import Selection, page_url
from dashboards.figures.head_maps import Heads
from dashboards.figures.styles import method_order, setting_label
from dashboards.rendering.table import Table, table
from kvpolicy.names import LEARNED
from storage.token_ranks import StoredContext

_WINDOW_TOKENS = 3000  # that are shown at once
_MOST_LISTED = 25
_NUM_AROUND = 6  # that a list shows before and after each of its tokens
_LEVELS = 9  # of shades, which the style sheet has
_DECADES = 3.0  # of attention, from the lightest shade to the darkest


@dataclass(frozen=True, kw_only=True)
class Shaded:
    """A token as it is shown.

    Attributes:
        text: its text; line breaks are kept, and marked.
        classes: of its look.
        hint: text at the pointer.
    """

    text: str
    classes: str
    hint: str


def tokens_page(records: Records, selection: Selection) -> Page:
    """The page.

    Raises:
        Nothing: there is no evaluation, or it kept no rankings.
    """
    evaluation = choose_evaluation(records, selection)
    contexts = records.contexts(evaluation)
    if not contexts:
        raise Nothing(UNRANKED, RANK)
    listed = _choose_context(selection, contexts)
    contenders = sorted(listed.rankings, key=lambda contender: (method_order(contender[0]), contender[1]))
    several = {method for method, seed in contenders if seed}
    labels = [(f"{m}.{seed}", f"{m}, seed {seed}" if m in several else m) for m, seed in contenders]
    default = next((value for value, _ in labels if value.startswith(f"{LEARNED}.")), labels[0][0])
    method, _, seed = selection.one("contender", "Method", labels, default=default).rpartition(".")
    context = records.context(listed, [(method, int(seed)), ORACLE])
    ranking = None if context is None else context.find(method, int(seed))
    if context is None or ranking is None:
        raise Nothing(f"The ranking of {listed.sample_id} by {method} is lost.", RANK)
    names = _head_names(records, evaluation, len(context.importance))
    heads = [(str(place), name) for place, name in enumerate(names)]
    head = int(selection.one("head", "Head", heads, default=str(most_selective_head(context))))
    budget = int(selection.one("budget", "Budget", map(str, context.budgets)))
    choice = HeadChoice.of(context, ranking, head=head, budget=budget)
    window = _choose_window(selection, len(choice.ranks))
    return Page(
        template="tokens.html",
        content={
            "title": "Tokens",
            "lead": f"{listed.sample_id}, {setting_label(listed.setting)}",
            "method": method,
            "head": names[head],
            "facts": _facts(choice, method, names[head], budget),
            "ranked": [_by_rank(context, choice, place, method) for place in window],
            "attended": [_by_attention(context, choice, place, method) for place in window],
            "dropped": _listed(
                "Wrongly dropped, by the attention that they receive",
                context,
                choice,
                choice.wrongly_dropped,
            ),
            "kept": _listed("Wrongly kept in their place", context, choice, choice.wrongly_kept),
            **_window_links(selection, window, len(choice.ranks)),
            "head_url": page_url("heads", evaluation.choices | {"head": head, "method": method}),
            "origin": [*origin(evaluation), lineage_link(listed.shard_id)],
        },
    )


def _choose_context(selection: Selection, contexts: Sequence[ListedContext]) -> ListedContext:
    samples = dict.fromkeys((context.sample_id, f"{context.task}: {context.sample_id}") for context in contexts)
    sample = selection.one("sample", "Sample", samples)
    by_setting = {context.setting: context for context in contexts if context.sample_id == sample}
    return by_setting[selection.one("setting", "Setting", [(name, setting_label(name)) for name in sorted(by_setting)])]


def _choose_window(selection: Selection, num_tokens: int) -> range:
    """Places of the tokens that are shown at once; the URL has one of them."""
    place = selection.number("from", default=0, least=0, most=max(0, num_tokens - 1))
    first = place // _WINDOW_TOKENS * _WINDOW_TOKENS
    return range(first, min(first + _WINDOW_TOKENS, num_tokens))


def _window_links(selection: Selection, window: range, num_tokens: int) -> dict[str, str]:
    """The range of the shown tokens, and URLs of those before and after them; empty where there are none."""
    first, stop = window.start, window.stop
    return {
        "window": f"tokens {first} to {stop - 1} of {num_tokens}" if num_tokens > len(window) else "",
        "earlier": selection.url("tokens", **{"from": first - _WINDOW_TOKENS}) if first else "",
        "later": selection.url("tokens", **{"from": stop}) if stop < num_tokens else "",
    }


def _head_names(records: Records, evaluation: Evaluation, num_heads: int) -> list[str]:
    rows = records.head_costs(evaluation)
    names = list(Heads.of_rows(rows).names) if rows else []
    return names if len(names) == num_heads else [f"head {head}" for head in range(num_heads)]


def _facts(choice: HeadChoice, method: str, head: str, budget: int) -> list[tuple[str, str]]:
    kept, tokens = choice.num_kept, len(choice.ranks)
    uneven = f" (its share of a budget of {budget} a head)" if kept != budget else ""
    return [
        (f"{kept} of {tokens}", f"tokens are kept in {head}{uneven}"),
        (f"{choice.share_kept:.1%}", f"of the future attention goes to what {method} keeps"),
        (f"{choice.best_share:.1%}", "would go to the best choice of as many"),
        (f"{int(choice.wrongly_dropped.sum())}", "are wrongly dropped: the best choice has them"),
    ]


def _by_rank(context: StoredContext, choice: HeadChoice, place: int, method: str) -> Shaded:
    rank = int(choice.ranks[place])
    level = _LEVELS - (_LEVELS * (rank - 1)) // max(1, choice.num_kept)  # from 9, kept longest, to 1
    classes = f"kept r{level}" if choice.kept[place] else "gone"
    return _shaded(context, choice, place, classes, f"{method} rank {rank}")


def _by_attention(context: StoredContext, choice: HeadChoice, place: int, method: str) -> Shaded:
    share, most = float(choice.importance[place]), float(choice.importance.max())
    level = 0 if share <= 0 else round(_LEVELS * (1 + np.log10(share / most) / _DECADES))
    return _shaded(context, choice, place, f"a{max(0, level)}", f"{method} rank {int(choice.ranks[place])}")


def _shaded(context: StoredContext, choice: HeadChoice, place: int, classes: str, hint: str) -> Shaded:
    wrong = ""
    if choice.wrongly_dropped[place]:
        classes, wrong = f"{classes} dropped", ", wrongly dropped"
    elif choice.wrongly_kept[place]:
        classes, wrong = f"{classes} extra", ", wrongly kept"
    always = ", always kept" if choice.always_kept[place] else ""
    share = f"{choice.importance[place]:.2%} of the future attention"
    return Shaded(
        text=context.pieces[place].replace("\n", "↵\n"),
        classes=classes,
        hint=f"token {place}: {hint}, oracle rank {int(choice.best_ranks[place])}; {share}{wrong}{always}",
    )


def _listed(caption: str, context: StoredContext, choice: HeadChoice, group: np.ndarray) -> Table:
    places = np.flatnonzero(group)
    places = places[np.argsort(-choice.importance[places], kind="stable")][:_MOST_LISTED]
    rest = int(group.sum()) - len(places)
    return table(
        caption + (f" (first {len(places)}; {rest} more)" if rest else ""),
        ["token", "where", "attention", "rank", "oracle's rank"],
        [
            [
                _plain(context.pieces[place]),
                f"{place}: …{_plain(''.join(context.pieces[max(0, place - _NUM_AROUND) : place + _NUM_AROUND]))}…",
                f"{choice.importance[place]:.2%}",
                str(int(choice.ranks[place])),
                str(int(choice.best_ranks[place])),
            ]
            for place in places.tolist()
        ],
        num_labels=2,
        folded=True,
    )


def _plain(text: str) -> str:
    return text.replace("\n", "↵")
