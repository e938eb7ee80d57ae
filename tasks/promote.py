"""Deciding who is champion: after an evaluation by comparison, by hand, or back to the one before.

Each decision is a run with a row in `promotions`. It is the commit; MLflow's aliases follow the rows, so that whoever
is killed in between finds the decision made, and moves the aliases when started again.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.evaluation import EvaluateConfig
from kvpolicy.names import CHAMPION, LEARNED
from kvpolicy.results.metrics import FIDELITY
from kvpolicy.results.promotion import FIRST_CHAMPION, PromoteConfig, PromotionDecision, decide_promotion
from kvpolicy.results.statistics import Bootstrap
from storage.catalog.catalog import Catalog, RunRecorder
from storage.catalog.promotions import AUTOMATIC, KEPT, MANUAL, PROMOTED, ROLLBACK, PromotionHistory, read_history
from storage.catalog.stored_scores import stored_scores
from storage.home import Home, exclusive
from storage.mlflow.tracking import CHALLENGER, Tracking
from storage.tables.lance_table import quote
from tasks.evaluate import read_scores
from tasks.framework.references import ModelRef, ShardRef, TrainedRef
from tasks.framework.stage import Stage, StageOutcome, run_stage, stage_task
from tasks.framework.wholeness import is_whole
from tasks.registration import ensure_registered

Row = Mapping[str, Any]
_DECISIVE = "query_agnostic"


@contextmanager
def promotion_lock(home: Home, model_digest: str) -> Iterator[None]:
    """Lock the decision on the champion of a model for the block."""
    with exclusive(home, f"promotion-{model_digest[:16]}"):
        yield


def present_champion(home: Home, model_digest: str, *, beside: str) -> str:
    """The champion of a model that another policy set is compared with, or empty.

    Where the catalog has no decisions yet it is the one that MLflow's alias names: earlier releases kept no others.
    """
    history = read_history(Catalog(home), model_digest)
    if history.rows:
        return history.champion
    aliased = Tracking(home).policy_with_alias(CHAMPION, beside=beside)
    return "" if aliased == beside else aliased


def require_whole(home: Home, policy_set_id: str) -> None:
    """Check that a policy set is where it was saved, undamaged.

    Raises:
        InputError: If it is not.
    """
    artifact = Catalog(home).artifact(policy_set_id)
    if not is_whole(home, artifact):
        raise InputError(
            f"{policy_set_id} is lost or damaged at {artifact.uri}: `kvp run` with the options of its training makes "
            "it again, or `kvp promote` another one"
        )


def compared_setting(evaluated: EvaluateConfig) -> str:
    """The setting whose scores decide: query-agnostic where it was evaluated."""
    return _DECISIVE if _DECISIVE in evaluated.settings else evaluated.settings[0]


def champion_config(evaluated: EvaluateConfig) -> EvaluateConfig:
    """The part of a challenger's evaluation that its champion takes part in."""
    return dataclasses.replace(
        evaluated,
        methods=(LEARNED,),
        settings=(compared_setting(evaluated),),
        num_generated=0,
        num_ranked=0,
        num_analysed=0,
        max_answer_tokens=None,
        num_policy_seeds=1,
        num_random_seeds=1,
    )


@stage_task("promote")
def decide_on_challenger(
    home: Home,
    model: ModelRef,
    challenger: TrainedRef,
    *,
    evaluation_id: str,
    evaluation_run_id: str,
    champion: TrainedRef | None,
    champion_shards: Sequence[ShardRef],
    config: PromoteConfig,
    evaluated: EvaluateConfig,
    seed: int,
) -> StageOutcome:
    """Decide between the policy set of an evaluation and the champion, under the lock of `promotion_lock`.

    Args:
        home: The home.
        model: The model.
        challenger: The policy set that was evaluated.
        evaluation_id: Its evaluation.
        evaluation_run_id: The run that has the scores.
        champion: The present champion; None where there is none.
        champion_shards: Its scores on the same examples, by `champion_config`.
        config: When to promote.
        evaluated: Configuration of the evaluation.
        seed: Of the bootstrap.
    """
    setting = compared_setting(evaluated)
    statistics: dict[str, Any] = {"num_resamples": evaluated.num_resamples, "confidence": evaluated.confidence}
    stage = Stage(
        name="promote",
        module=__name__,
        inputs={"challenger": challenger.artifact_id, "evaluation": evaluation_id, **_as_input(champion)},
        parameters={"kind": AUTOMATIC, "promote": dataclasses.asdict(config), "setting": setting, **statistics},
        seed=seed,
        parts={f"champion_shard_{index:04d}": shard.artifact_id for index, shard in enumerate(champion_shards)},
    )

    def body(run: RunRecorder) -> None:
        decision = FIRST_CHAMPION
        if champion is not None:
            wanted = {"method": LEARNED, "metric": FIDELITY, "setting": setting}
            new = stored_scores(Catalog(home), evaluation_run_id, **wanted, seed=challenger.seed)
            old = [score for score in read_scores(champion_shards) if vars(score).items() >= wanted.items()]
            decision = decide_promotion(new, old, config, Bootstrap(seed=seed, **statistics))
        before = "" if champion is None else champion.artifact_id
        row = _row(AUTOMATIC, model.digest, challenger.artifact_id, before, decision)
        compared = {"evaluation_id": evaluation_id, "setting": setting, "margin": config.margin}
        run.append("promotions", [row | compared])

    return run_stage(home, stage, body)


def promote_by_hand(home: Home, policy_set_id: str, *, reason: str) -> Row:
    """Make a policy set the champion of its model; returns the decision, or the earlier one if it is that already.

    Raises:
        InputError: If no training here made it, or it is lost.
        StorageError: If MLflow refuses.
    """
    model_digest = model_of_policy(home, policy_set_id)
    require_whole(home, policy_set_id)
    ensure_registered(home, policy_set_id)
    with promotion_lock(home, model_digest):
        before = present_champion(home, model_digest, beside=policy_set_id)
        if before != policy_set_id:
            _record_by_hand(home, model_digest, policy_set_id, kind=MANUAL, before=before, reason=reason)
        history = read_history(Catalog(home), model_digest)
        follow_decisions(home, history)
        return next(row for row in reversed(history.rows) if row["decision"] == PROMOTED)


def roll_back(home: Home, model_digest: str, *, reason: str) -> Row:
    """Make the champion before the present one champion again; returns the decision.

    A rollback that was killed before MLflow's alias had moved is ended, and no other one is made.

    Raises:
        InputError: If there was no champion before, or it is lost.
    """
    with promotion_lock(home, model_digest):
        history = read_history(Catalog(home), model_digest)
        interrupted = bool(history.rows) and history.rows[-1]["kind"] == ROLLBACK and follow_decisions(home, history)
        if not interrupted:
            if not history.champion_before:
                raise InputError(
                    f"nothing to roll back to: {history.champion or 'no policy set'} is the only champion there was"
                )
            require_whole(home, history.champion_before)
            _record_by_hand(
                home, model_digest, history.champion_before, kind=ROLLBACK, before=history.champion, reason=reason
            )
            history = read_history(Catalog(home), model_digest)
            follow_decisions(home, history)
        return history.rows[-1]


def follow_decisions(home: Home, history: PromotionHistory) -> bool:
    """Move MLflow's aliases to where the decisions put them; returns whether the champion's had to move.

    Raises:
        StorageError: If MLflow refuses, or a policy set is neither registered there nor whole in the home.
    """
    tracking = Tracking(home)
    for policy_set_id in filter(None, dict.fromkeys((history.challenger, history.champion))):
        ensure_registered(home, policy_set_id)
    if history.challenger:
        tracking.move_alias(CHALLENGER, history.challenger)
    return bool(history.champion) and tracking.move_alias(CHAMPION, history.champion)


def model_of_policy(home: Home, policy_set_id: str) -> str:
    """Digest of the model that a policy set was trained for.

    Raises:
        InputError: If no training here made it.
    """
    rows = Catalog(home).rows("heads", f"policy_set_id = {quote(policy_set_id)}", ["model_digest"])
    if not rows:
        raise InputError(
            f"{policy_set_id} is no policy set that was trained in {home.path}: "
            "`kvp sql 'SELECT DISTINCT policy_set_id FROM heads'` lists them"
        )
    return str(rows[0]["model_digest"])


def _record_by_hand(home: Home, model_digest: str, policy_set_id: str, *, kind: str, before: str, reason: str) -> None:
    ensure_registered(home, policy_set_id)  # where that cannot be, before it is decided
    stage = Stage(
        name="promote",
        module=__name__,
        inputs={"challenger": policy_set_id, **({"champion": before} if before else {})},
        # The same may be decided again after something else was.
        parameters={"kind": kind, "reason": reason, "after": read_history(Catalog(home), model_digest).last_run_id},
    )
    decision = PromotionDecision(promoted=True, reason=reason)
    row = _row(kind, model_digest, policy_set_id, before, decision) | {"evaluation_id": "", "setting": ""}
    run_stage(home, stage, lambda run: run.append("promotions", [row]))


def _row(kind: str, model_digest: str, challenger_id: str, before: str, decision: PromotionDecision) -> dict[str, Any]:
    return {
        "model_digest": model_digest,
        "kind": kind,
        "decision": PROMOTED if decision.promoted else KEPT,
        "challenger_id": challenger_id,
        "champion_before_id": before,
        "champion_id": challenger_id if decision.promoted else before,
        "worst_budget": decision.worst_budget,
        "worst_change": decision.worst_change,
        "reason": decision.reason,
        **(decision.difference.as_row("difference") if decision.difference else {}),
    }


def _as_input(champion: TrainedRef | None) -> dict[str, str]:
    return {} if champion is None else {"champion": champion.artifact_id}
