"""Using a policy: answer a prompt from a cache that is compacted once, after the prompt.

For one prompt at a time; the budget holds for every KV head.
"""

from dataclasses import dataclass

import torch

from kvpolicy.attention.prefill import prefill
from kvpolicy.cache import CompactedCache
from kvpolicy.decoding import decode_greedily
from kvpolicy.errors import InputError
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.policies.policy_set import PolicySet
from kvpolicy.prompts import encode_message
from kvpolicy.ranking import check_budget, kept_positions


@dataclass(frozen=True, kw_only=True)
class Generation:
    """An answer, and what its cache held.

    Attributes:
        text: The answer.
        num_prompt_tokens: Tokens of the prompt.
        num_kept_tokens: Entries that each KV head kept of them.
    """

    text: str
    num_prompt_tokens: int
    num_kept_tokens: int


def compressed_generate(
    model: LanguageModel, policy: PolicySet, prompt: str, *, budget: int, max_new_tokens: int = 128
) -> Generation:
    """Run a prompt, keep the `budget` entries of each KV head that its policy ranks highest, and answer greedily.

    A prompt that is not longer than the budget keeps everything.

    Args:
        model: The model that the policy was trained for.
        policy: Its policies.
        prompt: The user's message; the model's chat format, if it has one, is put around it.
        budget: Entries kept per KV head, in tokens.
        max_new_tokens: Tokens that the answer may have, at least 1.

    Raises:
        InputError: If the policy is of another shape, the prompt is empty or too long, the budget is below the tokens
            that are always kept, or the answer may have no tokens.
    """
    if policy.spec != model.spec:
        raise InputError(
            f"the policy set is for {policy.spec}, the model is {model.spec}: use the model of its training"
        )
    if not prompt.strip():
        raise InputError("the prompt is empty: there is nothing to answer")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
    token_ids = torch.tensor(encode_message(prompt, model.tokenizer))
    num_tokens = len(token_ids)
    if num_tokens + max_new_tokens > model.spec.max_positions:
        raise InputError(
            f"the prompt has {num_tokens} tokens and the answer may have {max_new_tokens}, but the model has "
            f"{model.spec.max_positions} positions: shorten the prompt or ask for fewer"
        )
    if budget < num_tokens:
        check_budget(budget, num_tokens)
    whole = prefill(model, token_ids, num_queries=1)
    positions = torch.arange(num_tokens, device=whole.keys.device)[None]
    kept = (
        kept_positions(policy.score(whole.keys, whole.values, positions), budget)
        if budget < num_tokens
        else positions.expand(model.spec.num_heads, -1)
    )
    cache = CompactedCache(
        whole.keys, whole.values, [kept], num_kv_heads=whole.num_kv_heads, num_new_tokens=max_new_tokens
    )
    answer = decode_greedily(
        model,
        cache,
        whole.logits[-1:].argmax(dim=-1),
        first_position=num_tokens,
        max_new_tokens=max_new_tokens,
    )[0]
    text: str = model.tokenizer.decode(answer, skip_special_tokens=True)
    return Generation(text=text, num_prompt_tokens=num_tokens, num_kept_tokens=int(kept.shape[1]))
