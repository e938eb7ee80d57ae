"""Training soft tokens to attend to a context as the model's response does (Judge Q, arXiv 2509.10798).

Soft tokens are appended to the context and only their embeddings are trained: the model is frozen. With a(i) the
attention that they pay to token i of the context, averaged over them, and r(i) that of the response, averaged over its
tokens, the loss is

    mean over KV heads of the sum over i of (a(i) - r(i))^2

Both are averaged over the group of query heads, as what they rank is a KV head's entries; each softmax runs over all
that its query sees, the soft tokens or the response included. In the query-agnostic setting, in which the question
comes after the compression, the response's tokens are those of the question and of the answer.

Departures, or choices that the paper's text leaves open to us: the mean over the group; the question as a part of the
response; embeddings begin as those of tokens that are drawn from the vocabulary; a step takes one context, and the
learning rate falls to 0 by cosine. It is given in units of the root mean square of the embeddings of the vocabulary,
so that one rate suits models of different scales.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.attention.logit_scale import LogitScale
from kvpolicy.attention.prefill import prefill
from kvpolicy.attention.probe import mean_attention, probe_attention, run_probe
from kvpolicy.config.settings import MoreThanZero, Positive, Settings
from kvpolicy.errors import InputError
from kvpolicy.inference.cache import CompactedCache
from kvpolicy.inference.decoding import decode_greedily
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.policies.soft_tokens import SoftTokens
from kvpolicy.text.encoded_sample import EncodedSample
from kvpolicy.text.protocol import cut_sample


@dataclass(frozen=True, kw_only=True)
class SoftTokenConfig(Settings):
    """How the soft tokens of `judgeq` are trained, where it is evaluated."""

    num_tokens: Positive = 32
    """Soft tokens; the paper has 32."""
    num_contexts: Positive = 30
    """Contexts to learn from, the first of those that policies are trained on."""
    num_steps: Positive = 150
    """Optimiser steps, of one context each."""
    learning_rate: MoreThanZero = 0.1
    """Adam's at the first step, in units of the root mean square of the vocabulary's embeddings."""
    response: Literal["greedy", "reference"] = "greedy"
    """Response whose attention is learned: the model's own `greedy` answer, as in the paper, or the `reference`."""
    max_response_tokens: Positive = 64
    """Tokens at which a greedy answer is cut, where the task allows more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Lesson:
    """One context, and how the response attends to it.

    Attributes:
        keys: Keys of the context.
        values: Its values.
        attention: Mean attention of the response's tokens and of the group.
        scaling: The model's factor on query-key products, and its cap.
        sequence_tokens: Length of the sequence that the context was run in.
    """

    keys: Float[Tensor, "head token dim"]
    values: Float[Tensor, "head token dim"]
    attention: Float[Tensor, "head token"]
    scaling: LogitScale
    sequence_tokens: int


@torch.no_grad()
def make_lesson(model: LanguageModel, example: EncodedSample, setting: str, config: SoftTokenConfig) -> Lesson:
    """Run an example once, and keep its context's cache and how the response attends to it.

    Raises:
        InputError: If the setting is unknown, or the sample too long for the model.
    """
    cut = cut_sample(example, setting)
    prompt = torch.tensor(example.context_ids + example.question_ids)
    of_model = config.response != "reference"
    most = min(config.max_response_tokens, example.sample.max_new_tokens) if of_model else len(example.answer_ids)
    model = model.for_answer(len(prompt), most, sample_id=example.sample.sample_id)
    response = greedy_response(model, prompt, max_new_tokens=most) if of_model else list(example.answer_ids)
    token_ids = torch.cat((prompt, torch.tensor(response)))
    n = cut.num_context
    whole = prefill(model, token_ids, num_queries=len(token_ids) - n)
    attention = mean_attention(whole.queries, whole.keys, num_context=n, scaling=whole.scaling)
    # Copies, so that what follows the context does not stay in memory.
    return Lesson(
        keys=whole.keys[:, :n].clone(),
        values=whole.values[:, :n].clone(),
        attention=attention,
        scaling=whole.scaling,
        sequence_tokens=len(prompt) + most,
    )


def greedy_response(model: LanguageModel, prompt: Int[Tensor, "token"], *, max_new_tokens: int) -> list[int]:
    """The model's own answer to a prompt; where it ends at once, the token that ends it."""
    num_tokens = len(prompt)
    whole = prefill(model, prompt, num_queries=0)
    everything = torch.arange(num_tokens).expand(model.spec.num_heads, -1)
    cache = CompactedCache(
        whole.keys, whole.values, [everything], num_kv_heads=whole.num_kv_heads, num_new_tokens=max_new_tokens
    )
    first = whole.logits[-1:].argmax(dim=-1)
    answer = decode_greedily(model, cache, first, first_position=num_tokens, max_new_tokens=max_new_tokens)[0]
    return answer or first.tolist()


def train_soft_tokens(
    model: LanguageModel,
    lessons: Sequence[Lesson],
    config: SoftTokenConfig,
    *,
    seed: int,
    model_digest: str,
    provenance: dict[str, Any] | None = None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> SoftTokens:
    """Train the embeddings of soft tokens.

    Every pass over the lessons has an order of its own.

    Args:
        model: The frozen model.
        lessons: Contexts with the attention that is aimed at; all are held in memory.
        config: How to train.
        seed: Seed of the first embeddings and of the order of lessons.
        model_digest: Digest of the model.
        provenance: Further entries of `training`, such as the prompts.
        on_step: Called after every step with its number, from 1, and its loss before the update.

    Raises:
        InputError: If there are no lessons, or a loss is not finite.
    """
    if not lessons:
        raise InputError("soft tokens: there are no lessons to train on")
    generator = torch.Generator().manual_seed(seed)
    embeddings, scale = _first_embeddings(model, config.num_tokens, generator)
    optimizer = torch.optim.Adam([embeddings], lr=config.learning_rate * scale)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.num_steps)
    losses: list[float] = []
    order: list[int] = []
    for step in range(1, config.num_steps + 1):
        order = order or torch.randperm(len(lessons), generator=generator).tolist()
        loss = attention_loss(model, lessons[order.pop()], embeddings)
        if not bool(loss.isfinite()):
            raise InputError(f"soft tokens: the loss of step {step} is {loss.item()}: use a smaller learning_rate")
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # of torch
        optimizer.step()
        decay.step()
        losses.append(loss.item())
        on_step(step, losses[-1])
    last = losses[-len(lessons) :]
    return SoftTokens(
        embeddings=embeddings.detach(),
        spec=model.spec,
        model_digest=model_digest,
        training={
            **(provenance or {}),
            "seed": seed,
            "num_lessons": len(lessons),
            "num_steps": config.num_steps,
            "learning_rate": config.learning_rate,
            "response": config.response,
            "first_loss": losses[0],
            "last_loss": sum(last) / len(last),
        },
    )


def attention_loss(model: LanguageModel, lesson: Lesson, embeddings: Float[Tensor, "probe width"]) -> Float[Tensor, ""]:
    """Squared error of the soft tokens' mean attention: summed over tokens, mean over KV heads."""
    probe = run_probe(model.for_sequence(lesson.sequence_tokens), lesson.keys, lesson.values, embeddings)
    attention = probe_attention(probe, lesson.keys, scaling=lesson.scaling)
    return (attention - lesson.attention).square().sum(dim=1).mean()


def _first_embeddings(model: LanguageModel, count: int, generator: torch.Generator) -> tuple[Tensor, float]:
    """Embeddings of drawn tokens, and the root mean square of the vocabulary's."""
    table = model.network.get_input_embeddings()  # type: ignore[operator]  # of transformers
    with torch.no_grad():
        tokens = torch.randint(0, table.weight.shape[0], (max(count, 1024),), generator=generator)
        drawn = table(tokens.to(model.device)).float()
    return drawn[:count].clone().requires_grad_(), float(drawn.square().mean().sqrt())
