"""Checking prompts before anything is collected or trained: what would otherwise be refused hours later."""

from collections.abc import Sequence

from kvpolicy.benchmarks.disjoint import check_disjoint
from kvpolicy.errors import InputError
from kvpolicy.presets.pipeline_config import PipelineConfig
from kvpolicy.text.encoded_sample import EncodedSample
from kvpolicy.text.protocol import cut_sample
from tasks.framework.references import ModelRef, PromptsRef
from tasks.framework.stage import stage_task
from tasks.inputs.loaded_model import load_model
from tasks.inputs.samples import read_encoded, read_samples


@stage_task("check-prompts")
def check_prompts(model: ModelRef, prompts: Sequence[PromptsRef], config: PipelineConfig) -> None:
    """Refuse leaks between splits, samples without positions, and budgets that do not fit.

    Args:
        model: The model.
        prompts: The sets of all splits; the last one is evaluated on.
        config: What will be done with them.

    Raises:
        InputError: Naming what two splits share, the first sample that the model or the agents have no positions for,
            or the first budget and sample that do not go together.
    """
    check_disjoint({part.split: read_samples(part) for part in prompts})
    *learned, evaluated = prompts
    for part in learned:
        for sample in read_encoded(part, model):
            _check_positions(model, sample, config, (config.collect.setting,), is_evaluated=False)
    evaluate = config.evaluate
    for sample in read_encoded(evaluated, model):
        _check_positions(model, sample, config, evaluate.settings, is_evaluated=True)
        for setting in evaluate.settings:
            evaluate.check_context(cut_sample(sample, setting).num_context, sample.sample.sample_id)


def _check_positions(
    model: ModelRef, sample: EncodedSample, config: PipelineConfig, settings: Sequence[str], *, is_evaluated: bool
) -> None:
    """Check that the model computes a sample as it should, and that the agents, if any, know all of its positions."""
    evaluate = config.evaluate
    has_soft_tokens = "soft_tokens" in evaluate.trained_kinds
    longest = max(cut_sample(sample, setting).num_context for setting in settings)
    prompt = len(sample.context_ids) + len(sample.question_ids)
    most = sample.sample.max_new_tokens
    generated = 0
    if is_evaluated and evaluate.num_generated:
        generated = min(most, evaluate.max_answer_tokens or most)
    elif has_soft_tokens and config.soft_tokens.response != "reference":
        generated = min(most, config.soft_tokens.max_response_tokens)
    follows = max(len(sample.answer_ids), *map(len, sample.option_ids), generated)
    probed = longest + config.soft_tokens.num_tokens if has_soft_tokens else 0
    needed = max(prompt + follows, probed)
    # A sample of traces is one pass, of whatever length; all else goes on from a prompt's cache.
    from_prompt = prompt if is_evaluated or has_soft_tokens else needed
    if (obstacle := load_model(model).length_obstacle(from_prompt, needed)) is not None:
        counted = f"with {config.soft_tokens.num_tokens} soft tokens" if needed == probed else "with its answer"
        raise InputError(
            f"sample {sample.sample.sample_id} takes {needed} tokens {counted}, but {obstacle} ({model.name}): use "
            "prompts of another length (length_tokens, or another preset), or a model that can"
        )
    if "policy_set" in evaluate.trained_kinds:
        config.train.agent.check_position(longest - 1)
