"""The flow `watch-models`: it looks at sources and starts `retrain` once for each model that the catalog does not know.

In a process of its own (`kvp watch`) pipelines run one after the other within it. As a deployment it starts the
deployment of `retrain`, so that a look takes no longer than checking what is new.
"""

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any

from prefect import flow
from prefect.deployments import run_deployment
from prefect.runtime import deployment

from flows.pipeline import HERE, NO_CHOICES, retrain
from flows.runtime.process import existing_home, home_path, open_home, prepare_process, watched_sources
from flows.runtime.run_options import Choices, Runner
from kvpolicy.errors import InputError, first_line
from kvpolicy.models.model_sources import ModelSource
from kvpolicy.presets.pipeline_config import Preset
from storage.home import Home, exclusive, is_held
from tasks.watch import ATTEMPTS, FAILED, FOUND, STARTED, Sighting, check_model, look_for_models, remember, retry_later

LOCK = "watch"
RETRAIN = "retrain/retrain"
SETTLE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class WatchReport:
    """What a look at the sources has found.

    Attributes:
        home: The home.
        dry_run: Whether it was only said what would be done.
        busy: Whether another watcher of this home was at work, so that nothing was looked at.
        sightings: Models that were not dealt with before, and sources that could not be looked at.
    """

    home: str
    dry_run: bool = False
    busy: bool = False
    sightings: list[Sighting] = dataclasses.field(default_factory=list)


@flow(name="watch-models")
def watch_models(
    sources: list[str] | None = None,
    preset: Preset = "demo",
    home: str | None = None,
    seed: int = 0,
    choices: Choices = NO_CHOICES,
    *,
    runner: Runner = HERE,
    settle_s: float = SETTLE_S,
    dry_run: bool = False,
) -> WatchReport:
    """Look at the sources once, and start `retrain` for each model that is new.

    Args:
        sources: `folder:PATH`, `hub:owner/name[@revision]` or `mlflow:NAME[@alias]` each; None for those of
            `KVP_WATCH`, between commas.
        preset: Of the pipelines, as everything below.
        home: The home.
        seed: The seed.
        choices: On top of the preset.
        runner: Where parts of the work run.
        settle_s: How long the files of a new model must stay as they are, in seconds.
        dry_run: Say what would be done, and write nothing.

    Raises:
        InputError: If a source, the preset or a choice is wrong.
        StorageError: If the home cannot be used, or with `dry_run` is not there.
    """
    places = [ModelSource.parse(source) for source in (watched_sources() if sources is None else sources)]
    if not 0 <= settle_s <= 3600:
        raise InputError(f"settle_s is {settle_s}, expected from 0 to 3600 seconds")
    dtype = choices.configure(preset).dtype
    if not places:  # a schedule that nobody has given a source makes no home
        return WatchReport(home=str(home_path(home)), dry_run=dry_run)
    prepare_process()
    if dry_run:
        present = existing_home(home)
        outcomes = look_for_models.fn(present, places, settle_s=settle_s)
        would = f"would be checked, and retrain started with the preset {preset}"
        waiting = [dataclasses.replace(one, reason=would) if one.outcome == FOUND else one for one in outcomes]
        return WatchReport(home=str(present.path), dry_run=True, sightings=waiting)
    opened = open_home(home)
    if is_held(opened, LOCK):
        return WatchReport(home=str(opened.path), busy=True)
    options = {"preset": preset, "home": str(opened.path), "seed": seed, "choices": choices, "runner": runner}
    with exclusive(opened, LOCK):
        outcomes = look_for_models(opened, places, settle_s=settle_s)
        ends = [_deal_with(opened, sighting, dtype, options) for sighting in outcomes]
    return WatchReport(home=str(opened.path), sightings=ends)


def _deal_with(home: Home, sighting: Sighting, dtype: str, options: dict[str, Any]) -> Sighting:
    """Check and start a model that was found; whatever became of it is remembered."""
    if sighting.outcome == FOUND:
        sighting = check_model(home, sighting, dtype=dtype)
    if sighting.outcome == FOUND:
        remember(home, sighting)  # before it is started: if this process dies, the next look knows whose it was
        sighting = _start(home, sighting, options)
    remember(home, sighting)
    return sighting


def _start(home: Home, sighting: Sighting, options: dict[str, Any]) -> Sighting:
    """Start the pipeline for a model: on the server where this is a deployment, else here and to its end."""
    if deployment.id is None:
        state = retrain(model=sighting.reference, **options, return_state=True)
        flow_run_id = str(state.state_details.flow_run_id or "")
        try:
            state.result()
        except Exception as error:  # whatever it is, other models are still to come
            reason = f"{first_line(error)}; tried {ATTEMPTS} times at most"
            return dataclasses.replace(sighting, outcome=FAILED, reason=reason, flow_run_id=flow_run_id)
        return dataclasses.replace(sighting, outcome=STARTED, flow_run_id=flow_run_id)
    plain = {
        name: value if isinstance(value, (str, int)) else dataclasses.asdict(value) for name, value in options.items()
    }
    try:
        run = run_deployment(
            RETRAIN,
            parameters={"model": sighting.reference, **plain},
            timeout=0,
            as_subflow=False,
            # Whoever dies before this is remembered gets the same flow run again, and not a second one.
            idempotency_key=hashlib.sha256(f"{home.path}\n{sighting.model_digest}".encode()).hexdigest(),
            tags=["kvpolicy", "watch"],
        )
    except Exception as error:  # the server's, or that there is no such deployment
        return retry_later(sighting, f"{RETRAIN} cannot be started: {first_line(error)}")
    return dataclasses.replace(sighting, outcome=STARTED, flow_run_id=str(run.id))
