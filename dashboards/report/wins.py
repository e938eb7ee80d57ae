"""Section: budgets at which the learned policies win or lose, in words and in numbers."""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from dashboards.figures.curves import point_words
from dashboards.figures.series import direction
from dashboards.figures.styles import in_order, short_metric
from dashboards.grouping import Place, grouped, place_of
from dashboards.rendering.formats import NOTHING, listed, number, percent
from dashboards.rendering.table import Table, table
from dashboards.report.claims import Claim, Opponent, claim_words, oracle_words, ratio, summary_words
from dashboards.report.document import MARKS, MARKS_NOTE, Block, Prose, missing, prose
from dashboards.report.view import ReportView, describe, section, short
from kvpolicy.names import MEAN_TASK
from kvpolicy.results.comparisons import UNDECIDED

REMEDY = "`kvp evaluate` of this release adds them to the table comparisons."


def headlines(view: ReportView) -> list[str]:
    """The outcome in a few sentences: one for each learned method, benchmark and setting, by the metric that leads."""
    lines = []
    for place in view.places:
        for method in view.learned:
            if claims := _lead_claims(view, place, method):
                words = describe(claims[0].metric)
                lines += [summary_words(claims, words), oracle_words(claims, words)]
    return [line for line in lines if line]


@section("claims", "Does the learned policy win?")
def wins_section(view: ReportView) -> Iterator[Block]:
    """Does a learned policy beat every baseline, budget by budget; against whom it does not; how far the oracle is."""
    if not view.learned:
        yield missing("a learned policy", "`kvp run` with `kvp` among the methods trains and evaluates one.")
        return
    if not view.claims:
        yield missing("paired differences between methods, so nothing can be claimed", REMEDY)
        return
    yield prose(
        "A method beats another where the bootstrap interval of their paired difference, over samples and over "
        "training seeds, excludes 0; at 95 % that takes six samples, as fewer agree by chance. A baseline is any "
        "method that evicts, does not know the future and is not made from these policy sets. Each interval stands for "
        "one pair at one budget: of twenty true ties about one is called a difference at 95 %, with few samples about "
        "two, and neighbouring budgets err together."
    )
    for place in view.places:
        for method in view.learned:
            yield from _of_place(view, place, method)
    if not view.task_claims:
        yield missing(
            "paired differences within single tasks",
            "They are computed from the table scores, which has no rows of this evaluation.",
        )


def _of_place(view: ReportView, place: Place, method: str) -> Iterator[Block]:
    claims = _lead_claims(view, place, method)
    if not claims:
        yield missing(f"{method} compared with other methods ({short(place)})", REMEDY)
        return
    words = describe(claims[0].metric)
    lines = (summary_words(claims, words), oracle_words(claims, words))
    yield Prose(lines=(f"{short(place)}: {method}",), kind="heading")
    yield Prose(lines=tuple(filter(None, lines)), kind="claim")
    yield Prose(lines=tuple(claim_words(claim, view.share(place, claim.budget)) for claim in claims))
    yield _against_best(view, place, claims)
    yield _against_each(place, claims)
    yield from _by_metric(view, place, method)
    yield from _by_task(view, place, method)


def _lead_claims(view: ReportView, place: Place, method: str) -> list[Claim]:
    """By the metric that leads among those that were compared."""
    return next(iter(_by_metrics(view, view.claims, place, method).values()), [])


def _by_metrics(view: ReportView, claims: Sequence[Claim], place: Place, method: str) -> dict[str, list[Claim]]:
    """The claims of a method in a place by metric, the one that leads first."""
    matching = [claim for claim in claims if (claim.place, claim.method) == (place, method)]
    by_metric = grouped(matching, attrgetter("metric"))
    return {metric: by_metric[metric] for metric in view.metrics(place) if metric in by_metric}


def _against_best(view: ReportView, place: Place, claims: Sequence[Claim]) -> Table:
    metric, method = claims[0].metric, claims[0].method
    rows = []
    for claim in claims:
        best, oracle = next(iter(claim.baselines), None), claim.oracle
        share = view.share(place, claim.budget)
        row = {
            "budget (of context)": f"{claim.budget}" + (f" ({percent(share)})" if share else ""),
            f"{method} [interval]": point_words(claim.point),
            "best baseline": f"{best.method} {number(best.value)}" if best else NOTHING,
            "ratio": ratio(claim, best),
            "difference [interval]": _cell(best),
            "confidence": f"{best.confidence:.3f}" if best else NOTHING,
            "oracle": number(oracle.value if oracle else None),
            "ratio to oracle": ratio(claim, oracle),
            "difference to oracle [interval]": _cell(oracle),
            "std of seeds": NOTHING if claim.seed_std is None else f"{number(claim.seed_std)} of {claim.num_seeds}",
        }
        rows.append(row)
    return table(
        f"{method} against the best baseline and the oracle: {short(place)}, {short_metric(metric)}",
        rows[0],
        [row.values() for row in rows],
        note=f"Here {direction(metric)}. The best baseline is the one with the best mean there, chosen by the same "
        f"scores, which flatters it. Confidence: share of the resamples in which {method} is better. {MARKS_NOTE}.",
    )


def _against_each(place: Place, claims: Sequence[Claim]) -> Table:
    method, metric = claims[0].method, claims[0].metric
    of = {(claim.budget, other.method): other for claim in claims for other in (*claim.baselines, *claim.variants)}
    rivals = in_order(name for _, name in of)
    return table(
        f"{method} minus every other contender: {short(place)}, {short_metric(metric)}",
        ("other method", *(str(claim.budget) for claim in claims)),
        [(name, *(_cell(of.get((claim.budget, name))) for claim in claims)) for name in rivals],
        note=f"Difference [interval] by budget. Here {direction(metric)}. {MARKS_NOTE}.",
    )


def _cell(other: Opponent | None, *, with_name: bool = False) -> str:
    if other is None:
        return NOTHING
    return f"{MARKS[other.verdict]} {f'{other.method} ' if with_name else ''}{other.difference_words}"


def _by_metric(view: ReportView, place: Place, method: str) -> Iterator[Block]:
    """The other metrics of a place: one line each."""
    if curves := list(_by_metrics(view, view.claims, place, method).items())[1:]:
        yield Prose(lines=tuple(summary_words(claims, describe(metric)) for metric, claims in curves))
        title = f"{method} minus the baseline that stands strongest against it, by metric: {short(place)}"
        yield _strongest(title, "metric", [(short_metric(metric), claims) for metric, claims in curves])


def _by_task(view: ReportView, place: Place, method: str) -> Iterator[Block]:
    metric, lead = next(iter(_by_metrics(view, view.task_claims, place, method).items()), ("", []))
    curves = sorted(grouped((claim for claim in lead if claim.task != MEAN_TASK), attrgetter("task")).items())
    if len(curves) < 2:  # a single task is the mean over tasks
        return
    if any(other.verdict != UNDECIDED for _, claims in curves for claim in claims for other in claim.baselines):
        yield Prose(lines=tuple(summary_words(claims, _task_words(task, metric)) for task, claims in curves))
    else:
        counts = sorted({row["n"] for row in view.rows.task_comparisons if place_of(row) == place})
        yield prose(
            f"Within single tasks nothing is established: they have {listed(map(str, counts))} samples, and at 95 % it "
            "takes six that agree."
        )
    title = f"{method} minus the baseline that stands strongest against it, by task: {short(place)}, "
    yield _strongest(title + short_metric(metric), "task", curves)


def _task_words(task: str, metric: str) -> Callable[[Claim], str]:
    return lambda claim: f"{short(claim.place)}, task {task}, {short_metric(metric)}"


def _strongest(title: str, what: str, curves: Sequence[tuple[str, Sequence[Claim]]]) -> Table:
    budgets = sorted({claim.budget for _, claims in curves for claim in claims})
    rows = []
    for name, claims in curves:
        of = {claim.budget: claim.toughest for claim in claims}
        rows.append((name, *(_cell(of.get(budget), with_name=True) for budget in budgets)))
    return table(
        title,
        (what, *map(str, budgets)),
        rows,
        note="Difference [interval] by budget, to a baseline that it loses to where there is one, else to one that is "
        f"undecided, else to the best one. {MARKS_NOTE}.",
    )
