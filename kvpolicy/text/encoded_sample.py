"""From a sample to token ids: context, question and answer, with the model's own chat format around them.

The user's turn is context and question; the assistant's turn begins with the answer prefix. The chat format
(`kvpolicy.text.chat_format`) is put around the parts, not into them, and the parts are tokenised apart, each as what
follows the one before (`kvpolicy.text.encoding`): the end of the context is a token boundary in the query-aware and the
query-agnostic setting alike. A joint tokenisation could differ by a token at the two seams; where it has boundaries
there, the tokens are the same.

A dialogue is one long chat in the same format: every turn's text lies in what the template writes between turns. Its
context ends where the text of a turn begins, after the header of that turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.text.chat_format import DialogueFormat, PromptFormat, dialogue_format, prompt_format, template_text
from kvpolicy.text.encoding import Piece, TextEncoder
from kvpolicy.text.sample import Sample


@dataclass(frozen=True, kw_only=True)
class EncodedSample:
    """A sample in tokens.

    Attributes:
        sample: The sample.
        context_ids: Head of the chat format and context.
        question_ids: Question, head of the assistant's turn and answer prefix; empty for a dialogue.
        answer_ids: Reference answer and the token that ends the turn; for a dialogue all turns after the context.
        option_ids: Every option as it follows the question, without a token that ends the turn.
    """

    sample: Sample
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    option_ids: tuple[tuple[int, ...], ...] = ()


def encode(sample: Sample, tokenizer: Any) -> EncodedSample:
    """Tokenises a sample.

    Args:
        sample: The sample.
        tokenizer: A tokenizer of transformers.

    Raises:
        InputError: A part has no tokens.
    """
    encoded = _encode_dialogue(sample, tokenizer) if sample.context_turns else _encode_prompt(sample, tokenizer)
    parts = {
        "context": encoded.context_ids,
        "question": encoded.question_ids or bool(sample.context_turns),
        "answer": encoded.answer_ids,
        **{f"option {option!r}": ids for option, ids in zip(sample.options, encoded.option_ids, strict=True)},
    }
    for part, ids in parts.items():
        if not ids:
            raise InputError(f"sample {sample.sample_id}: the {part} has no tokens, so nothing could be measured on it")
    return encoded


def encode_message(message: str, tokenizer: Any) -> list[int]:
    """Tokenises a user's message up to where its answer begins, in the format that samples are encoded in."""
    codec = _codec(tokenizer)
    form = codec.prompt
    text = message.strip() if form.strips else message
    return _start(form) + codec.encode([_written(form.head), Piece(text), _written(form.tail)], follows=False)


def count_prompt_tokens(sample: Sample, tokenizer: Any) -> int:
    """Tokens of context and question, chat format and answer prefix included, as `encode` makes them."""
    context, question = _prompt_ids(sample, _codec(tokenizer))
    return len(context) + len(question)


def count_all_tokens(sample: Sample, tokenizer: Any) -> int:
    """Tokens of the prompt and of the longest of what may follow: answer, an option, or what is generated."""
    encoded = encode(sample, tokenizer)
    longest = max(len(encoded.answer_ids), sample.max_new_tokens, *map(len, encoded.option_ids), 0)
    return len(encoded.context_ids) + len(encoded.question_ids) + longest


def count_turn_tokens(turns: tuple[str, ...], tokenizer: Any) -> tuple[int, ...]:
    """Tokens of every turn of a dialogue with what is written before it, each counted on its own."""
    codec = _codec(tokenizer)
    pieces = _turn_pieces(turns, codec.dialogue)
    return tuple(len(codec.encode(pieces[2 * turn : 2 * turn + 2], follows=turn > 0)) for turn in range(len(turns)))


@dataclass(frozen=True, kw_only=True)
class _Codec:
    """What a tokenizer makes of prompts."""

    prompt: PromptFormat
    dialogue: DialogueFormat
    encoder: TextEncoder

    def encode(self, pieces: list[Piece], *, follows: bool) -> list[int]:
        return self.encoder.encode(pieces, follows=follows)


def _codec(tokenizer: Any) -> _Codec:
    template, special = getattr(tokenizer, "chat_template", None), tokenizer.special_tokens_map
    return _make_codec(tokenizer, f"{template} {special} {len(tokenizer)}")


@lru_cache(maxsize=4)
def _make_codec(tokenizer: Any, state: str) -> _Codec:
    """The codec of a tokenizer in a state: templates and special tokens can be set."""
    return _Codec(
        prompt=prompt_format(tokenizer),
        dialogue=dialogue_format(tokenizer),
        encoder=TextEncoder(tokenizer, template_text(tokenizer)),
    )


def _encode_prompt(sample: Sample, tokenizer: Any) -> EncodedSample:
    codec = _codec(tokenizer)
    end = [] if codec.prompt.end_id is None else [codec.prompt.end_id]
    context, question = _prompt_ids(sample, codec)
    answer, *options = (codec.encode([Piece(text)], follows=True) for text in (sample.answer, *sample.options))
    return EncodedSample(
        sample=sample,
        context_ids=tuple(context),
        question_ids=tuple(question),
        answer_ids=(*answer, *end),
        option_ids=tuple(map(tuple, options)),
    )


def _encode_dialogue(sample: Sample, tokenizer: Any) -> EncodedSample:
    codec = _codec(tokenizer)
    pieces = _turn_pieces((*sample.context_turns, *sample.answer_turns), codec.dialogue)
    cut = 2 * len(sample.context_turns) + 1  # behind the header of the first turn that is no context
    return EncodedSample(
        sample=sample,
        context_ids=(*_start(codec.dialogue), *codec.encode(pieces[:cut], follows=False)),
        question_ids=(),
        answer_ids=tuple(codec.encode(pieces[cut:], follows=True)),
    )


def _prompt_ids(sample: Sample, codec: _Codec) -> tuple[list[int], list[int]]:
    form, context, question = codec.prompt, sample.context, sample.question
    if form.strips:
        context, question = context.lstrip(), question.rstrip()
        context = context if question else context.rstrip()
        question = question if context else question.lstrip()
    joined = form.is_chat or not sample.answer_prefix or question[-1:].isspace()
    prefix = sample.answer_prefix if joined else f" {sample.answer_prefix}"
    return (
        _start(form) + codec.encode([_written(form.head), Piece(context)], follows=False),
        codec.encode([Piece(question), _written(form.tail), Piece(prefix)], follows=True),
    )


def _turn_pieces(turns: tuple[str, ...], form: DialogueFormat) -> list[Piece]:
    """Header and text of every turn, one after the other."""
    texts = [text.strip() if form.strips else text for text in turns]
    return [piece for turn, text in enumerate(texts) for piece in (_written(form.before(turn)), Piece(text))]


def _written(text: str) -> Piece:
    return Piece(text, is_format=True)


def _start(form: PromptFormat | DialogueFormat) -> list[int]:
    return [] if form.start_id is None else [form.start_id]
