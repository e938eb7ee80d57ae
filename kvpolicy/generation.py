"""Using a policy: answer a prompt from a compacted cache.

The cache is compacted once, after the prompt, or also after every chunk of the prompt and while the answer grows, so
that its size is bounded whatever the length of either. For one prompt at a time; the budget holds for every KV head.
"""

from dataclasses import dataclass

import torch

from kvpolicy.decoding import decode_greedily
from kvpolicy.errors import InputError
from kvpolicy.methods.learned import LearnedPolicy
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.policies.policy_set import PolicySet
from kvpolicy.prompts import encode_message
from kvpolicy.ranking import NUM_RECENT_TOKENS, NUM_SINK_TOKENS, check_budget
from kvpolicy.streaming import StreamedCaches, StreamedRow


@dataclass(frozen=True, kw_only=True)
class Generation:
    """An answer, and what its cache held.

    Attributes:
        text: The answer.
        num_prompt_tokens: Tokens of the prompt.
        num_kept_tokens: Entries that each KV head kept of them.
        num_slots: Entries for which each KV head had room at the end of the answer.
    """

    text: str
    num_prompt_tokens: int
    num_kept_tokens: int
    num_slots: int


def compressed_generate(
    model: LanguageModel,
    policy: PolicySet,
    prompt: str,
    *,
    budget: int,
    max_new_tokens: int = 128,
    chunk_tokens: int | None = None,
    evict_every_tokens: int | None = None,
) -> Generation:
    """Run a prompt, keep the `budget` entries of each KV head that its policy ranks highest, and answer greedily.

    A prompt that is not longer than the budget keeps everything. What is evicted after a chunk is gone when the next
    one is run, so an answer after chunks is not the one after the whole prompt at once.

    Args:
        model: The model that the policy was trained for.
        policy: Its policies.
        prompt: The user's message; the model's chat format, if it has one, is put around it.
        budget: Entries kept per KV head, in tokens.
        max_new_tokens: Tokens that the answer may have, at least 1.
        chunk_tokens: Tokens of the prompt that are run between two evictions; None runs them all at once.
        evict_every_tokens: Tokens of the answer between two evictions; None keeps all of it.

    Raises:
        InputError: If the policy is of another shape, the prompt is empty or too long, the budget is below the tokens
            that are always kept, the answer may have no tokens, or a chunk or an interval has none.
    """
    if policy.spec != model.spec:
        raise InputError(
            f"the policy set is for {policy.spec}, the model is {model.spec}: use the model of its training"
        )
    if not prompt.strip():
        raise InputError("the prompt is empty: there is nothing to answer")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
    if type(budget) is not int:
        raise InputError(f"budget is {budget!r}, expected a whole number of tokens")
    token_ids = torch.tensor(encode_message(prompt, model.tokenizer))
    num_tokens = len(token_ids)
    if num_tokens + max_new_tokens > model.spec.max_positions:
        raise InputError(
            f"the prompt has {num_tokens} tokens and the answer may have {max_new_tokens}, but the model has "
            f"{model.spec.max_positions} positions: shorten the prompt or ask for fewer"
        )
    check_budget(budget, max(budget, num_tokens))
    most = max(num_tokens + max_new_tokens, NUM_SINK_TOKENS + NUM_RECENT_TOKENS)
    row = StreamedRow(method=LearnedPolicy(policy=policy), budget=min(budget, most))
    # Room is made for a whole interval: no more of it than there are tokens.
    chunk = num_tokens if chunk_tokens is None else min(chunk_tokens, num_tokens)
    interval = max_new_tokens if evict_every_tokens is None else min(evict_every_tokens, max_new_tokens)
    cache = StreamedCaches(model, [row], interval_tokens=chunk)
    logits = cache.run(model, token_ids[None], torch.arange(num_tokens)[None], num_logits=1)
    cache.evict_every(interval)
    num_kept = cache.num_held(0)
    answer = decode_greedily(
        model, cache, logits[:, -1].argmax(dim=-1), first_position=num_tokens, max_new_tokens=max_new_tokens
    )[0]
    text: str = model.tokenizer.decode(answer, skip_special_tokens=True)
    return Generation(text=text, num_prompt_tokens=num_tokens, num_kept_tokens=num_kept, num_slots=cache.num_slots)
