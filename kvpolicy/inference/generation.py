"""Using a policy: answer prompts from compacted caches.

A cache is compacted once, after the prompt, or also after every chunk of the prompt and while the answer grows, so that
its size is bounded whatever the length of either. The budget holds for every KV head.

Prompts are read one after the other, so that at most one of them is in memory uncompacted, and answered together: the
caches of a batch lie side by side, each with its entries at the right end and its own positions. So a prompt is read as
it would be alone, whatever is in the batch beside it, and its answer is the same up to rounding.
"""

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, Unpack, overload

import torch
from jaxtyping import Int
from torch import Tensor

from kvpolicy.errors import InputError
from kvpolicy.inference.cache import run_alike
from kvpolicy.inference.decoding import decode_greedily
from kvpolicy.inference.streaming import StreamedCaches, StreamedRow
from kvpolicy.methods.learned import LearnedPolicy
from kvpolicy.methods.ranking import NUM_RECENT_TOKENS, NUM_SINK_TOKENS, check_budget
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.policies.policy_set import PolicySet
from kvpolicy.text.chat_format import prompt_format
from kvpolicy.text.encoded_sample import encode_message

_Texts = list[str] | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """An answer, and what its cache held.

    Attributes:
        text: The answer.
        token_ids: Its tokens, without the one that ends it.
        num_prompt_tokens: Tokens of the prompt.
        num_kept_tokens: Entries that each KV head kept of them.
        num_slots: Entries for which each KV head had room at the end of the answer; in a batch, of the largest.
        cache_bytes: Memory of all keys and values that were kept of the prompt, as it was when the answer began.
        tokens_per_s: Tokens that were decoded in a second, those of the whole batch; None if there was nothing to
            decode after the first token, which comes from the prompt.
        format_note: Why the prompt is not in the model's own chat format, or where it departs from it; empty if
            neither.
    """

    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_kept_tokens: int
    num_slots: int
    cache_bytes: int
    tokens_per_s: float | None = field(compare=False)
    format_note: str = ""

    @property
    def num_evicted_tokens(self) -> int:
        """Entries of the prompt that each KV head evicted: 0 for a prompt that is not longer than the budget."""
        return self.num_prompt_tokens - self.num_kept_tokens


class _Options(TypedDict, total=False):
    max_new_tokens: int
    chunk_tokens: int | None
    evict_every_tokens: int | None
    allow_other_model: bool


@overload
def compressed_generate(
    model: LanguageModel, policy: PolicySet, prompt: str, *, budget: int | None, **options: Unpack[_Options]
) -> Generation: ...
@overload
def compressed_generate(
    model: LanguageModel, policy: PolicySet, prompt: _Texts, *, budget: int | None, **options: Unpack[_Options]
) -> list[Generation]: ...
def compressed_generate(
    model: LanguageModel,
    policy: PolicySet,
    prompt: str | _Texts,
    *,
    budget: int | None,
    max_new_tokens: int = 128,
    chunk_tokens: int | None = None,
    evict_every_tokens: int | None = None,
    allow_other_model: bool = False,
) -> Generation | list[Generation]:
    """Run prompts, keep the `budget` entries of each KV head that its policy ranks highest, and answer greedily.

    A prompt that is not longer than the budget keeps everything (`Generation.num_evicted_tokens` is 0). What is evicted
    after a chunk is gone when the next one is run, so an answer after chunks is not the one after the whole prompt at
    once.

    Args:
        model: The model that the policy was trained for (`kvpolicy.load_model`).
        policy: Its policies (`kvpolicy.load_policy`); their weights are moved to the model's device.
        prompt: The user's message, or several of any lengths; the model's chat format, if it has one, is put around
            each. White space at the ends of a message is left out where the model's chat template does so. What is
            spelled like a control token (`<|im_end|>`) is text in a message.
        budget: Entries kept per KV head, in tokens; None keeps everything, to compare with.
        max_new_tokens: Tokens that an answer may have, at least 1.
        chunk_tokens: Tokens of a prompt that are run between two evictions; None runs them all at once.
        evict_every_tokens: Tokens of the answer between two evictions; None keeps all of it.
        allow_other_model: Take the policy of another model of the same shape as well, such as one that was fine-tuned.

    Returns:
        The answer, or a list of them for several prompts.

    Raises:
        InputError: If the policy is of another model, a prompt is empty or too long, the budget is below the tokens
            that are always kept, the answer may have no tokens, or a chunk or an interval has none.
    """
    _require_own_model(model, policy, allow_other_model=allow_other_model)
    _check_counts(
        budget=budget,
        max_new_tokens=max_new_tokens,
        chunk_tokens=chunk_tokens,
        evict_every_tokens=evict_every_tokens,
    )
    if not isinstance(prompt, Iterable):
        raise InputError(f"the prompt is of type {type(prompt).__name__}, expected text, or a list of texts")
    prompts = _encode(model, [prompt] if isinstance(prompt, str) else list(prompt), max_new_tokens)
    if budget is not None:
        check_budget(budget, max(budget, *map(len, prompts)))
    policy.agents.to(model.device)
    method = LearnedPolicy(policy=policy)

    def row(num_tokens: int) -> StreamedRow:
        most = max(num_tokens + max_new_tokens, NUM_SINK_TOKENS + NUM_RECENT_TOKENS)
        return StreamedRow(method=method, budget=most if budget is None else min(budget, most))

    # Room is made for a whole interval: no more of it than there are tokens.
    interval = min(evict_every_tokens or max_new_tokens, max_new_tokens)
    answers: dict[int, Generation] = {}
    for numbers in _of_like_length(model, prompts):
        model = model.for_sequence(max(len(prompts[number]) for number in numbers) + max_new_tokens)
        read = [
            _read(model, row(len(ids)), ids, chunk_tokens or len(ids))
            for ids in (prompts[number] for number in numbers)
        ]
        batch = _answer(model, read, interval_tokens=interval, max_new_tokens=max_new_tokens)
        answers |= zip(numbers, batch, strict=True)
    return answers[0] if isinstance(prompt, str) else [answers[number] for number in range(len(prompts))]


def _of_like_length(model: LanguageModel, prompts: Sequence[Int[Tensor, "_"]]) -> list[list[int]]:
    """Numbers of the prompts that are answered together: a batch has the rotary frequencies of one length."""
    change = model.change_tokens or 0
    sides = (
        [number for number, token_ids in enumerate(prompts) if (len(token_ids) > change) == is_long]
        for is_long in (False, True)
    )
    return [side for side in sides if side]


def _read(
    model: LanguageModel, row: StreamedRow, token_ids: Int[Tensor, "token"], chunk_tokens: int
) -> tuple[StreamedCaches, Int[Tensor, "1"]]:
    """Run a prompt and compact its cache; also the first token of the answer."""
    cache = StreamedCaches(model, [row], interval_tokens=min(chunk_tokens, len(token_ids)))
    logits = run_alike(model, cache, token_ids, first_position=0, num_logits=1)
    cache.finish(0)
    return cache, logits[:, -1].argmax(dim=-1)


def _answer(
    model: LanguageModel,
    read: list[tuple[StreamedCaches, Int[Tensor, "1"]]],
    *,
    interval_tokens: int,
    max_new_tokens: int,
) -> list[Generation]:
    """Answer all prompts at once, given their caches and the first tokens of their answers; both are used up."""
    note = prompt_format(model.tokenizer).note
    figures = [(cache.num_seen_tokens, cache.num_held(0), cache.num_bytes) for cache, _ in read]
    first_tokens = torch.cat([first for _, first in read])
    batch = StreamedCaches.joined([cache for cache, _ in read], interval_tokens=interval_tokens)
    read.clear()  # or the memory of what was copied into the batch stays
    start = time.perf_counter()
    answers = decode_greedily(
        model,
        batch,
        first_tokens,
        first_position=torch.tensor([num_tokens for num_tokens, _, _ in figures]),
        max_new_tokens=max_new_tokens,
    )
    tokens_per_s = batch.num_run_tokens / (time.perf_counter() - start) if batch.num_run_tokens else None
    return [
        Generation(
            text=model.tokenizer.decode(answer, skip_special_tokens=True),
            token_ids=tuple(answer),
            num_prompt_tokens=num_tokens,
            num_kept_tokens=num_kept,
            num_slots=batch.num_slots,
            cache_bytes=num_bytes,
            tokens_per_s=tokens_per_s,
            format_note=note,
        )
        for (num_tokens, num_kept, num_bytes), answer in zip(figures, answers, strict=True)
    ]


def _require_own_model(model: LanguageModel, policy: PolicySet, *, allow_other_model: bool) -> None:
    if not allow_other_model:
        if not model.digest:
            raise InputError(
                "the model was loaded without its digest, so that it cannot be told from another one: load it with "
                "kvpolicy.load_model"
            )
        policy.require_model(model.digest)
    if policy.spec != model.spec:
        raise InputError(
            f"the policy set is for {policy.spec}, the model is {model.spec}: use the model of its training"
        )


def _check_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and type(count) is not int:
            raise InputError(f"{name} is {count!r}, expected a whole number of tokens")
        if count is not None and count < 1 and name != "budget":  # of which more than that is asked
            raise InputError(f"{name} is {count}, expected at least 1 token")


def _encode(model: LanguageModel, prompts: Sequence[str], max_new_tokens: int) -> list[Int[Tensor, "_"]]:
    """Tokens of every prompt, none of which is empty or too long."""
    if not prompts:
        raise InputError("there are no prompts, expected at least one")
    encoded = []
    for number, prompt in enumerate(prompts, start=1):
        which = "the prompt" if len(prompts) == 1 else f"prompt {number} of {len(prompts)}"
        if not isinstance(prompt, str):
            raise InputError(f"{which} is of type {type(prompt).__name__}, expected text")
        if not prompt.strip():
            raise InputError(f"{which} is empty: there is nothing to answer")
        if (lone := re.search("[\ud800-\udfff]", prompt)) is not None:  # half of a pair, as of bytes that are no text
            raise InputError(f"{which} is no text: its character {lone.start()} is {lone[0]!r}, half of a pair")
        token_ids = torch.tensor(encode_message(prompt, model.tokenizer))
        obstacle = model.length_obstacle(len(token_ids), len(token_ids) + max_new_tokens)
        if obstacle is not None:
            raise InputError(
                f"{which} has {len(token_ids)} tokens and the answer may have {max_new_tokens}, but {obstacle}: "
                "shorten the prompt or ask for fewer"
            )
        encoded.append(token_ids)
    return encoded
