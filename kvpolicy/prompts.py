"""From a sample to token ids: context, question and answer, with the model's own chat format around them.

The user's turn is context and question; the assistant's turn begins with the answer prefix. The chat format is put
around the parts, not into them: the template is rendered once for a marker instead of the user's text and cut at the
marker. So the three parts are tokenised apart, and the end of the context is a token boundary in the query-aware and
the query-agnostic setting alike. A joint tokenisation could differ by a token at the two seams.

A dialogue is one long chat in the same format: every turn's text lies in what the template writes between turns. Its
context ends where the text of a turn begins, after the header of that turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpolicy.benchmarks.sample import Sample
from kvpolicy.errors import InputError

_USER_MARK = "KVPUSERTEXTMARK"
_ASSISTANT_MARK = "KVPASSISTANTTEXTMARK"

# Template variables that would make prompts depend on the day (Llama 3) or open a chain of thought (Qwen 3).
_TEMPLATE_VARIABLES = {"date_string": "26 Jul 2024", "enable_thinking": False}


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


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """What a tokenizer's chat template writes around the user's text.

    Attributes:
        head: Before the context.
        tail: Between the question and the answer prefix.
        is_chat: Whether there is a chat template; without one a blank comes before the answer prefix, as in RULER,
            unless the question ends with white space.
        end_id: Token that ends the assistant's turn, or None.
        start_id: Token before everything that is not written in `head`, or None.
    """

    head: str
    tail: str
    is_chat: bool
    end_id: int | None
    start_id: int | None


@dataclass(frozen=True, kw_only=True)
class DialogueFormat:
    """What a tokenizer's chat template writes around the turns of a dialogue.

    Attributes:
        head: Before the user's first text.
        to_assistant: Between a user's text and the assistant's.
        to_user: Between an assistant's text and the next one of the user.
        start_id: Token before everything that is not written in `head`, or None.
    """

    head: str
    to_assistant: str
    to_user: str
    start_id: int | None

    def before(self, turn: int) -> str:
        """What is written before the text of a turn, counted from 0."""
        return self.head if turn == 0 else self.to_assistant if turn % 2 else self.to_user


def prompt_format(tokenizer: Any) -> PromptFormat:
    """The format of a tokenizer: its chat template, or plain concatenation where it has none that works."""
    try:
        user = [{"role": "user", "content": _USER_MARK}]
        rendered = _render(tokenizer, user, add_generation_prompt=True)
    except Exception:  # templates are programs of their authors: whatever they raise, there is no usable template
        rendered = None
    if rendered is None or rendered.count(_USER_MARK) != 1:
        return PromptFormat(
            head="", tail="", is_chat=False, end_id=tokenizer.eos_token_id, start_id=tokenizer.bos_token_id
        )
    head, tail = rendered.split(_USER_MARK)
    return PromptFormat(head=head, tail=tail, is_chat=True, end_id=_end_of_turn(tokenizer), start_id=None)


def dialogue_format(tokenizer: Any) -> DialogueFormat:
    """The format of dialogues: the chat template, or where none works for three exchanges, plain role names.

    The plain format writes `User:` or `Assistant:`, a new line and the text, and a blank line between turns. What a
    template adds to the last answer alone (Qwen 3: an empty chain of thought) is not written: no answer counts as the
    last one.
    """
    marks = [f"KVPTURN{number}MARK" for number in range(6)]
    turns = [{"role": "assistant" if place % 2 else "user", "content": mark} for place, mark in enumerate(marks)]
    pieces, rest = [], ""
    try:
        rest = _render(tokenizer, turns, add_generation_prompt=False)
    except Exception:  # as above
        rest = ""
    for mark in marks:
        piece, found, rest = rest.partition(mark)
        if found:
            pieces.append(piece)
    # Before turns 0 to 5; the first and the last exchange may be written differently, the one between is the rule.
    if len(pieces) < len(marks) or pieces[2] != pieces[4]:
        return DialogueFormat(
            head="User:\n",
            to_assistant="\n\nAssistant:\n",
            to_user="\n\nUser:\n",
            start_id=tokenizer.bos_token_id,
        )
    return DialogueFormat(head=pieces[0], to_assistant=pieces[3], to_user=pieces[4], start_id=None)


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
    form = prompt_format(tokenizer)
    start = [] if form.start_id is None else [form.start_id]
    return start + _ids(tokenizer, form.head + message + form.tail)


def count_prompt_tokens(sample: Sample, tokenizer: Any) -> int:
    """Tokens of context and question, chat format and answer prefix included, as `encode` makes them."""
    context, question = _prompt_ids(sample, tokenizer, prompt_format(tokenizer))
    return len(context) + len(question)


def count_all_tokens(sample: Sample, tokenizer: Any) -> int:
    """Tokens of the prompt and of the longest of what may follow: answer, an option, or what is generated."""
    encoded = encode(sample, tokenizer)
    longest = max(len(encoded.answer_ids), sample.max_new_tokens, *map(len, encoded.option_ids), 0)
    return len(encoded.context_ids) + len(encoded.question_ids) + longest


def count_turn_tokens(turns: tuple[str, ...], tokenizer: Any) -> tuple[int, ...]:
    """Tokens of every turn of a dialogue with what is written before it, each counted on its own."""
    form = dialogue_format(tokenizer)
    return tuple(len(_ids(tokenizer, form.before(place) + text)) for place, text in enumerate(turns))


def _encode_prompt(sample: Sample, tokenizer: Any) -> EncodedSample:
    form = prompt_format(tokenizer)
    end = [] if form.end_id is None else [form.end_id]
    context, question = _prompt_ids(sample, tokenizer, form)
    return EncodedSample(
        sample=sample,
        context_ids=tuple(context),
        question_ids=tuple(question),
        answer_ids=(*_ids(tokenizer, sample.answer), *end),
        option_ids=tuple(tuple(_ids(tokenizer, option)) for option in sample.options),
    )


def _encode_dialogue(sample: Sample, tokenizer: Any) -> EncodedSample:
    form = dialogue_format(tokenizer)
    texts = (*sample.context_turns, *sample.answer_turns)
    cut = len(sample.context_turns)
    written = [form.before(place) + text for place, text in enumerate(texts)]
    context = "".join(written[:cut]) + form.before(cut)
    answer = "".join(written[cut:]).removeprefix(form.before(cut))
    start = [] if form.start_id is None else [form.start_id]
    return EncodedSample(
        sample=sample,
        context_ids=(*start, *_ids(tokenizer, context)),
        question_ids=(),
        answer_ids=tuple(_ids(tokenizer, answer)),
    )


def _prompt_ids(sample: Sample, tokenizer: Any, form: PromptFormat) -> tuple[list[int], list[int]]:
    start = [] if form.start_id is None else [form.start_id]
    context = start + _ids(tokenizer, form.head + sample.context)
    joined = form.is_chat or not sample.answer_prefix or sample.question[-1:].isspace()
    blank = "" if joined else " "
    return context, _ids(tokenizer, f"{sample.question}{form.tail}{blank}{sample.answer_prefix}")


def _ids(tokenizer: Any, text: str) -> list[int]:
    # Not `verbose`: contexts are compacted, so a text longer than the model's maximum is no reason to warn here.
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _end_of_turn(tokenizer: Any) -> int | None:
    """The special token that the template writes after an answer; the tokenizer's end of text where it writes none."""
    end_of_text: int | None = tokenizer.eos_token_id
    turns = [{"role": "user", "content": _USER_MARK}, {"role": "assistant", "content": _ASSISTANT_MARK}]
    try:
        _, found, after = _render(tokenizer, turns, add_generation_prompt=False).partition(_ASSISTANT_MARK)
    except Exception:  # as above: a template that renders no answer still has its user's turn
        return end_of_text
    ids = _ids(tokenizer, after.lstrip()) if found and after.strip() else []
    return ids[0] if ids and ids[0] in tokenizer.all_special_ids else end_of_text


def _render(tokenizer: Any, turns: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
    rendered: str = tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=add_generation_prompt, **_TEMPLATE_VARIABLES
    )
    return rendered
