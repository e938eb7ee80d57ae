"""Champion and challenger after an evaluation: the champion is evaluated on the same examples, then it is decided."""

from functools import partial
from itertools import chain

from flows.runners.fan_out import run_parts
from kvpolicy.names import LEARNED
from storage.catalog.catalog import Catalog
from storage.catalog.promotions import read_history
from tasks.evaluate import ExampleGroup, evaluate_shard
from tasks.framework.references import ContenderRef, ShardRef, TrainedRef, trained_ref
from tasks.framework.work import Plan
from tasks.promote import (
    champion_config,
    decide_on_challenger,
    follow_decisions,
    present_champion,
    promotion_lock,
    require_whole,
)
from tasks.publish import evaluated_examples


def decide_after_evaluation(plan: Plan, *, challenger_id: str, evaluation_id: str, evaluation_run_id: str) -> None:
    """Decide whether the policy set of an evaluation becomes the champion of its model, once.

    Nothing is decided where `kvp` was not evaluated, on the champion itself, and on what was decided before.

    Args:
        plan: Of the run that ends with the evaluation.
        challenger_id: The policy set that it trained; of several seeds the first.
        evaluation_id: The evaluation.
        evaluation_run_id: The run that has its scores.

    Raises:
        InputError: If the champion is lost, or cannot evaluate these examples.
    """
    if LEARNED not in plan.config.evaluate.contenders:
        return
    home, model_digest, catalog = plan.home, plan.model.digest, Catalog(plan.home)
    with promotion_lock(home, model_digest):
        champion_id = present_champion(home, model_digest, beside=challenger_id)
        decided = read_history(catalog, model_digest).decision_on(challenger_id, evaluation_id)
        if champion_id != challenger_id and decided is None:
            champion = None
            if champion_id:
                require_whole(home, champion_id)
                champion = trained_ref(home, champion_id)
            decide_on_challenger(
                home,
                plan.model,
                trained_ref(home, challenger_id),
                evaluation_id=evaluation_id,
                evaluation_run_id=evaluation_run_id,
                champion=champion,
                champion_shards=[] if champion is None else _evaluate(plan, champion),
                config=plan.config.promote,
                evaluated=plan.config.evaluate,
                seed=plan.seed,
            )
        follow_decisions(home, read_history(catalog, model_digest))


def _evaluate(plan: Plan, champion: TrainedRef) -> list[ShardRef]:
    """The champion on the examples of this plan; what it was evaluated on before is found again."""
    config, prompts = champion_config(plan.config.evaluate), plan.made[("prompts", "test")]
    champion_ref = ContenderRef(method=LEARNED, seed=champion.seed, trained=champion)
    group = partial(
        ExampleGroup,
        model=plan.model,
        prompts=prompts,
        contenders=(champion_ref,),
        config=config,
        seed=plan.seed,
    )
    parts = [
        partial(evaluate_shard, plan.home, group(first=first, stop=stop))
        for first, stop in evaluated_examples(prompts, config)
    ]
    return list(chain.from_iterable(run_parts("evaluate champion", parts)))
