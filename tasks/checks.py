"""Checking prompts before anything is collected or trained: what would otherwise be refused hours later."""

from collections.abc import Sequence

from kvpolicy.benchmarks.disjoint import check_disjoint
from kvpolicy.errors import InputError
from kvpolicy.pipeline import PipelineConfig
from kvpolicy.prompts import EncodedSample
from kvpolicy.protocol import cut_sample
from tasks.model import load_model
from tasks.references import ModelRef, PromptsRef
from tasks.samples import read_encoded, read_samples
from tasks.stage import stage_task


@stage_task("check-prompts")
def check_prompts(model: ModelRef, prompts: Sequence[PromptsRef], config: PipelineConfig) -> None:
    """Refuse leaks between splits, samples without positions, and budgets that do not fit.

    Args:
        model: The model.
        prompts: The sets of all splits; the last one is judged on.
        config: What will be done with them.

    Raises:
        InputError: Naming what two splits share, the first sample that the model or the agents have no positions for,
            or the first budget and sample that do not go together.
    """
    check_disjoint({part.split: read_samples(part) for part in prompts})
    *learned, judged = prompts
    for part in learned:
        for sample in read_encoded(part, model):
            _check_positions(model, sample, config, (config.collect.setting,), most_answer_tokens=0)
    evaluate = config.evaluate
    for sample in read_encoded(judged, model):
        allowed = min(sample.sample.max_new_tokens, evaluate.max_answer_tokens or sample.sample.max_new_tokens)
        generated = allowed if evaluate.num_generated else 0
        _check_positions(model, sample, config, evaluate.settings, most_answer_tokens=generated)
        for setting in evaluate.settings:
            evaluate.check_context(cut_sample(sample, setting).num_context, sample.sample.sample_id)


def _check_positions(
    model: ModelRef, sample: EncodedSample, config: PipelineConfig, settings: Sequence[str], *, most_answer_tokens: int
) -> None:
    """Check that the model, and the agents if there will be any, know every position that a sample takes."""
    longest = max(cut_sample(sample, setting).num_context for setting in settings)
    prompt = len(sample.context_ids) + len(sample.question_ids)
    follows = max(len(sample.answer_ids), *map(len, sample.option_ids), most_answer_tokens)
    probed = longest + config.soft_tokens.num_tokens if config.evaluate.needs("soft_tokens") else 0
    needed, most = max(prompt + follows, probed), load_model(model).spec.max_positions
    if needed > most:
        counted = "tokens" if needed > probed else f"with {config.soft_tokens.num_tokens} soft tokens"
        raise InputError(
            f"model {model.name} has {most} positions and sample {sample.sample.sample_id} {needed} {counted}: "
            "use a model with a longer context, or a preset with shorter prompts"
        )
    if config.evaluate.needs("policy_set"):
        config.train.agent.check_position(longest - 1)
