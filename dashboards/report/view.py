"""One evaluation as the sections of a report see it: curves by benchmark and setting, claims, and their origin."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from dashboards.figures.series import Panel, make_panels
from dashboards.figures.styles import place_label, short_metric
from dashboards.grouping import Place, grouped, place_of
from dashboards.report.claims import Claim, learned_methods, make_claims, ordered_metrics
from dashboards.report.document import Block, Section
from dashboards.report.evaluation_rows import ReportRows
from kvpolicy.names import MEAN_TASK


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportView:
    """The content of sections.

    Attributes:
        rows: everything that was read.
    """

    rows: ReportRows

    @cached_property
    def panels(self) -> list[Panel]:
        """All curves."""
        return make_panels(self.rows.curves)

    @cached_property
    def places(self) -> list[Place]:
        """Benchmarks and settings, in the order of figures."""
        return list(dict.fromkeys((panel.benchmark, panel.setting) for panel in self.panels))

    @cached_property
    def learned(self) -> list[str]:
        """Methods that are made from this evaluation's policy sets."""
        return learned_methods(self.rows.curves)

    @cached_property
    def claims(self) -> list[Claim]:
        """Claims of every learned method, mean over tasks."""
        return make_claims(self.rows.comparisons, self.panels, self.learned)

    @cached_property
    def task_claims(self) -> list[Claim]:
        """Claims within single tasks."""
        return make_claims(self.rows.task_comparisons, self.panels, self.learned)

    @cached_property
    def origin(self) -> Mapping[str, Sequence[str]]:
        """Origin of the evaluation: words to ids."""
        rows = self.rows
        trained = [training.run.id for training in rows.trainings]
        snapshots = [name for training in rows.trainings for name in training.snapshot_ids]
        sealed = [edge.source for edge in rows.graph.edges if edge.role == "output" and edge.target in snapshots]
        ids = {words: rows.input_ids([rows.run_id], kind) for words, kind in _READ.items()}
        return {
            "evaluation": [rows.evaluation_id],
            "run": [rows.run_id],
            **ids,
            "training runs": trained,
            "traces": list(dict.fromkeys(snapshots)),
            "training prompts": rows.input_ids(sealed, "prompts"),
        }

    def metrics(self, place: Place) -> list[str]:
        """Metrics that methods compete for in a place, the leading one first."""
        there = {panel.metric for panel in self.panels if (panel.benchmark, panel.setting) == place}
        return ordered_metrics(there)

    def panels_of(self, place: Place, metric: str) -> tuple[Panel | None, list[Panel]]:
        """The panel of the mean over tasks, if any, and those of single tasks."""
        panels = [p for p in self.panels if (p.benchmark, p.setting, p.metric) == (*place, metric)]
        mean = next((panel for panel in panels if panel.task == MEAN_TASK), None)
        return mean, [panel for panel in panels if panel.task != MEAN_TASK]

    @cached_property
    def contexts(self) -> Mapping[Place, float]:
        """Mean tokens of context of the evaluated samples."""
        by_place = grouped(self.rows.samples, place_of)
        return {place: fmean(row["context_tokens"] for row in rows) for place, rows in by_place.items()}

    def share(self, place: Place, budget: int) -> float | None:
        """A budget's share of the mean context, where its length is known."""
        return budget / self.contexts[place] if place in self.contexts else None


def section(
    anchor: str, title: str
) -> Callable[[Callable[[ReportView], Iterator[Block]]], Callable[[ReportView], Section]]:
    """Make a section of a function that yields its blocks; its origin is the evaluation's."""

    def decorate(blocks: Callable[[ReportView], Iterator[Block]]) -> Callable[[ReportView], Section]:
        def make(view: ReportView) -> Section:
            return Section(anchor=anchor, title=title, blocks=tuple(blocks(view)), origin=view.origin)

        make.__name__ = anchor
        return make

    return decorate


def short(place: Place) -> str:
    """A place in a few words."""
    return place_label(*place)


def describe(metric: str) -> Callable[[Claim], str]:
    """Words for where claims about a metric stand."""
    return lambda claim: f"{short(claim.place)}, {short_metric(metric)}"


_READ = {
    "model": "model",
    "evaluated prompts": "prompts",
    "policy sets": "policy_set",
    "soft tokens": "soft_tokens",
    "request": "request",
    "code": "code",
    "environment": "environment",
}
