"""One view of a whole run: of every stage the parts that are done, running and failed, and the time that is left.

People see it on standard error, and in Prefect as an artifact of the flow run. What goes on within a part is shown by
the part itself (`tasks.framework.progress`).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from tasks.framework.progress import LOGGER, SECONDS_BETWEEN_LINES, duration, terminal_bars

if TYPE_CHECKING:
    from rich.progress import Progress

_SECONDS_BETWEEN_UPDATES = 5.0
_PAGE = 200  # Prefect's limit of rows an answer
_Place = Callable[["RunProgress", float, bool], None]
_VIEW: ContextVar["_View | None"] = ContextVar("view", default=None)


@dataclass(kw_only=True)
class StageProgress:
    """How far the parts of a stage are.

    Attributes:
        total: Parts in all.
        part_s: What a part took in earlier runs, in seconds; None if that is not known.
        done: Parts that have ended well.
        running: Parts that run, at most as many as there are workers.
        failed: Parts that have failed.
        started_at: On the monotonic clock; None for a stage that has not begun.
        ended_at: The same for its end.
    """

    total: int
    part_s: float | None = None
    done: int = 0
    running: int = 0
    failed: int = 0
    started_at: float | None = None
    ended_at: float | None = None

    def left_s(self, now: float) -> float | None:
        """Seconds that are left, by its own pace as soon as it has one; None if nothing tells."""
        if self.ended_at is not None:
            return 0.0
        if self.started_at is not None and self.done:
            return (now - self.started_at) / self.done * (self.total - self.done)
        return None if self.part_s is None else self.part_s * (self.total - self.done)

    @property
    def was_there(self) -> bool:
        """Whether all of it was made by an earlier run."""
        return not self.total or (self.ended_at is not None and self.started_at is None)

    def note(self) -> str:
        """What its counts of parts that are done do not say."""
        if self.was_there:
            return "there already"
        counts = {"running": self.running, "failed": self.failed}
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)

    def told(self) -> str:
        """Its counts in a few words."""
        note = self.note()
        if self.was_there:
            return note
        return f"{self.done}/{self.total}" + (f" ({note})" if note else "")


@dataclass(kw_only=True)
class RunProgress:
    """How far a run is.

    Attributes:
        stages: Those that have parts, in the order in which they run.
    """

    stages: dict[str, StageProgress] = field(default_factory=dict)

    def begin(self, name: str, total: int, now: float) -> StageProgress:
        """A stage begins, with as many parts; all before it are over, whether their parts ran or were found."""
        stage = self.stages.setdefault(name, StageProgress(total=total))
        for earlier in self.stages.values():
            if earlier is stage:
                break
            earlier.ended_at = earlier.ended_at or now
        stage.total, stage.started_at, stage.ended_at = total, now, None
        stage.done = stage.running = stage.failed = 0
        return stage

    def fraction(self, now: float) -> float:
        """Share of the run that is done, from 0 to 1: by time if earlier runs tell of all stages, else by stages."""
        stages = self.stages.values()
        whole_s = sum(_whole_s(stage, now) for stage in stages)
        if any(stage.part_s is None for stage in stages) or not whole_s:
            shares = [1.0 if stage.ended_at is not None else stage.done / max(1, stage.total) for stage in stages]
            return sum(shares) / max(1, len(shares))
        return max(0.0, 1.0 - sum(stage.left_s(now) or 0.0 for stage in stages) / whole_s)

    def line(self, now: float) -> str:
        """All stages and the time that is left, in one line."""
        counts = ", ".join(f"{name} {stage.told()}" for name, stage in self.stages.items())
        return "; ".join(filter(None, [counts, self.left(now)]))

    def left(self, now: float) -> str:
        """The time that is left of the run, in words; empty if nothing tells."""
        left = {name: stage.left_s(now) for name, stage in self.stages.items() if stage.ended_at is None}
        known_s = sum(seconds for seconds in left.values() if seconds is not None)
        unknown = [name for name, seconds in left.items() if seconds is None]
        if not known_s:
            return ""
        return f"about {duration(known_s)} left" + (f" without {' and '.join(unknown)}" if unknown else "")


def _whole_s(stage: StageProgress, now: float) -> float:
    spent_s = 0.0 if stage.started_at is None else (stage.ended_at or now) - stage.started_at
    return spent_s + (stage.left_s(now) or 0.0)


@contextmanager
def showing_run(expected: Mapping[str, StageProgress]) -> Iterator[None]:
    """Show the progress of a run that has these stages; the flow run around this call gets it as an artifact."""
    with _shown(RunProgress(stages=dict(expected)), _artifact()) as view:
        yield
        for stage in view.progress.stages.values():
            stage.ended_at = stage.ended_at or time.monotonic()
        view.show(at_once=True)


def recorded_progress(client: Any, flow_run_ids: Sequence[UUID]) -> dict[str, str]:
    """How far flow runs were when they last said so, as a line each; those that do not say are left out.

    Args:
        client: Prefect's client.
        flow_run_ids: The flow runs.
    """
    from prefect.client.schemas.filters import ArtifactFilter

    if not flow_run_ids:
        return {}
    chosen = ArtifactFilter.model_validate({"flow_run_id": {"any_": flow_run_ids}, "type": {"any_": ["progress"]}})
    return {
        str(artifact.flow_run_id): f"{artifact.data:.0f} %: {artifact.description}"
        for artifact in client.read_artifacts(artifact_filter=chosen, limit=_PAGE)
    }


@contextmanager
def showing_stage(name: str, total: int) -> Iterator[Callable[..., None]]:
    """Show the progress of a stage, in the view of its run if there is one.

    Args:
        name: Of the stage.
        total: Parts that it has.

    Yields:
        A function that takes the counts that have changed: `done`, `running`, `failed`.
    """
    shown = _VIEW.get()
    with nullcontext(shown) if shown is not None else _shown(RunProgress()) as view:
        stage = view.progress.begin(name, total, time.monotonic())

        def change(**counts: int) -> None:
            for count, value in counts.items():
                setattr(stage, count, value)
            view.show(at_once=stage.done == total or bool(stage.failed))

        yield change
        stage.ended_at = time.monotonic()


@dataclass(kw_only=True)
class _View:
    """A progress and where it is shown: each place takes the progress, the time, and whether it has to show it now."""

    progress: RunProgress
    places: tuple[_Place, ...]

    def show(self, *, at_once: bool) -> None:
        now = time.monotonic()
        for place in self.places:
            place(self.progress, now, at_once)


@contextmanager
def _shown(progress: RunProgress, *more: _Place) -> Iterator[_View]:
    with terminal_bars() as bars:
        view = _View(progress=progress, places=(_lines() if bars is None else _bars(bars), *more))
        token = _VIEW.set(view)
        try:
            view.show(at_once=False)
            yield view
        finally:
            _VIEW.reset(token)


def _lines() -> _Place:
    last_line = ""

    def say(progress: RunProgress, now: float) -> None:
        nonlocal last_line
        if (line := progress.line(now)) != last_line:
            last_line = line
            LOGGER.info("run: %s", line)

    return _now_and_then(say, SECONDS_BETWEEN_LINES)


def _artifact() -> _Place:
    from prefect.artifacts import create_progress_artifact, update_progress_artifact  # not for who only reads it

    artifact_id = create_progress_artifact(0.0, description="not begun")

    def update(progress: RunProgress, now: float) -> None:
        update_progress_artifact(artifact_id, round(100 * progress.fraction(now), 1), progress.line(now))

    return _now_and_then(update, _SECONDS_BETWEEN_UPDATES)


def _bars(bars: "Progress") -> _Place:
    ids: dict[str, Any] = {}

    def show(progress: RunProgress, now: float, at_once: bool) -> None:
        for name, stage in progress.stages.items():
            if name not in ids:
                ids[name] = bars.add_task(name, unit="parts", note="")
            over = stage.ended_at is not None
            left = "" if over or stage.started_at is None else progress.left(now)
            note = ", ".join(filter(None, [stage.note(), left and f"run: {left}"]))
            bars.update(ids[name], total=stage.total, completed=stage.total if over else stage.done, note=note)

    return show


def _now_and_then(show: Callable[[RunProgress, float], None], every_s: float) -> _Place:
    last = time.monotonic()

    def place(progress: RunProgress, now: float, at_once: bool) -> None:
        nonlocal last
        if at_once or now - last >= every_s:
            last = now
            show(progress, now)

    return place
