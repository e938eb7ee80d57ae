"""The format of a model's prompts: the text that its chat template writes around others, and tokens that end an answer.

A template is rendered with marks in the place of texts and cut at the marks, so it is followed around texts and never
inside them: a text is put in as it is. The one exception is white space at the ends of a text, which is left out where
the template strips it. A template that rewrites texts (collapses white space, escapes signs) is departed from there,
and `note` says so.

A rendered text must be the same tomorrow and elsewhere: the clock of templates stands still (`PINNED_TIME`), and a
template that draws at random is not used.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

PINNED_TIME = datetime.datetime(2024, 7, 26)
"""The time that templates take for now: the day that Llama 3's template names where nobody gives it one."""

_USER_MARK = "KVPUSERTEXTMARK"
_ASSISTANT_MARK = "KVPASSISTANTTEXTMARK"
_TURN_MARKS = tuple(f"KVPTURN{number}MARK" for number in range(6))
# What templates do to texts shows here: inner white space, capitals, and signs that mean something in HTML or JSON.
_REWRITTEN = "Two  blanks,\n\n\ta <tag> & a \\'quote\\\" é"

# Template variables that would make prompts depend on the day (Llama 3) or open a chain of thought (Qwen 3).
_TEMPLATE_VARIABLES = {"date_string": PINNED_TIME.strftime("%d Jul %Y"), "enable_thinking": False}

# Names are written out, as those of strftime follow the locale of the process.
_NAMES = {"%A": "Friday", "%a": "Fri", "%B": "July", "%b": "Jul", "%h": "Jul", "%p": "AM", "%Z": "", "%z": ""}
_COMPOSED = {"%c": "Fri Jul 26 00:00:00 2024", "%x": "07/26/24", "%X": "00:00:00"}
_NUMBERS = [*(f"%{letter}" for letter in "dmYyHIMSfjUWwuGVeFTDRC"), *(f"%-{letter}" for letter in "dmyHIMSj")]
_PINNED_DIRECTIVES = {**_NAMES, **_COMPOSED, **{number: PINNED_TIME.strftime(number) for number in _NUMBERS}}
# transformers lets no function of ours into a template, so its `strftime_now` is covered by a macro. The line ends
# behind the macro: so the first line of the template begins a line, as it did.
_PINNED_CLOCK = (
    "{%- macro strftime_now(format) %}{% set clock = namespace(parts=[]) %}{% for part in format.split('%%') %}"
    "{% set clock.text = part %}{% for directive, value in kvp_directives.items() %}"
    "{% set clock.text = clock.text.replace(directive, value) %}{% endfor %}"
    "{% set clock.parts = clock.parts + [clock.text] %}{% endfor %}{{ clock.parts | join('%') }}{% endmacro %}\n"
)
_DRAWS = re.compile(r"(?:\||\bfilter)\s*random\b|['\"]random['\"]|\blipsum\s*\(")


@dataclass(frozen=True, kw_only=True)
class _Format:
    """Attributes that the formats of prompts and of dialogues share.

    Attributes:
        head: Text before the context, or before the first text of the user.
        is_chat: Whether there is a chat template that works.
        start_id: Token before everything that is not written in `head`, or None.
        strips: Whether the template leaves out white space at the ends of a text.
        note: Why the format is not the model's own chat format, or where it departs from it; empty if neither.
    """

    head: str
    is_chat: bool
    start_id: int | None
    strips: bool = False
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class PromptFormat(_Format):
    """The text that a tokenizer's chat template writes around the user's text.

    Without a chat template a blank comes before the answer prefix, as in RULER, unless the question ends with white
    space.

    Attributes:
        tail: Text between the question and the answer prefix.
        end_id: Token that ends the assistant's turn, or None.
    """

    tail: str
    end_id: int | None


@dataclass(frozen=True, kw_only=True)
class DialogueFormat(_Format):
    """The texts that a tokenizer's chat template writes around the turns of a dialogue.

    Attributes:
        to_assistant: Text between a user's text and the assistant's.
        to_user: Text between an assistant's text and the next one of the user.
    """

    to_assistant: str
    to_user: str

    def before(self, turn: int) -> str:
        """The text before that of a turn, counted from 0."""
        return self.head if turn == 0 else self.to_assistant if turn % 2 else self.to_user


class _UnusableTemplateError(Exception):
    """No format can be read off the template; the message says why."""


def prompt_format(tokenizer: Any) -> PromptFormat:
    """The format of a tokenizer: its chat template, or plain concatenation where it has none that works."""
    try:
        rendered = _render_turns(tokenizer, [_USER_MARK], add_generation_prompt=True)
        if rendered.count(_USER_MARK) != 1:
            raise _UnusableTemplateError("the model's chat template does not write the user's text once and as it is")
    except _UnusableTemplateError as error:
        end, start = tokenizer.eos_token_id, tokenizer.bos_token_id
        return PromptFormat(head="", tail="", is_chat=False, end_id=end, start_id=start, note=str(error))
    head, tail = rendered.split(_USER_MARK)
    strips, note = _treatment_of_texts(
        lambda texts: _rendered_or_none(tokenizer, texts, add_generation_prompt=True), [_USER_MARK], [head, tail]
    )
    ends = _turn_ends(tokenizer)
    return PromptFormat(
        head=head,
        tail=tail,
        is_chat=True,
        end_id=ends[0] if ends else tokenizer.eos_token_id,
        start_id=None,
        strips=strips,
        note=note,
    )


def dialogue_format(tokenizer: Any) -> DialogueFormat:
    """The format of dialogues: the chat template, or where none works for three exchanges, plain role names.

    The plain format writes `User:` or `Assistant:`, a new line and the text, and a blank line between turns. What a
    template adds to the last answer alone (Qwen 3: an empty chain of thought) is not written: no answer counts as the
    last one.
    """
    try:
        rendered = _render_turns(tokenizer, _TURN_MARKS)
        any_mark = "|".join(_TURN_MARKS)
        # Before turns 0 to 5 and after them; the first and the last exchange may be written differently, the one
        # between is the rule.
        pieces = re.split(any_mark, rendered)
        if tuple(re.findall(any_mark, rendered)) != _TURN_MARKS or pieces[2] != pieces[4]:
            raise _UnusableTemplateError("the model's chat template does not write every turn of a dialogue, and alike")
    except _UnusableTemplateError as error:
        return DialogueFormat(
            head="User:\n",
            to_assistant="\n\nAssistant:\n",
            to_user="\n\nUser:\n",
            is_chat=False,
            start_id=tokenizer.bos_token_id,
            note=str(error),
        )
    *marks, last_mark = _TURN_MARKS
    strips, note = _treatment_of_texts(
        lambda texts: _rendered_or_none(tokenizer, [*texts, last_mark]),
        marks,
        [*pieces[:5], f"{pieces[5]}{last_mark}{pieces[6]}"],
    )
    return DialogueFormat(
        head=pieces[0],
        to_assistant=pieces[3],
        to_user=pieces[4],
        is_chat=True,
        start_id=None,
        strips=strips,
        note=note,
    )


def end_ids(tokenizer: Any, configured: int | Iterable[int] | None = None) -> frozenset[int]:
    """All tokens that end an answer.

    Args:
        tokenizer: The tokenizer; its end of text and what its template ends an assistant's turn with are among them.
        configured: `eos_token_id` of the model's generation configuration.
    """
    listed = [configured] if configured is None or isinstance(configured, int) else list(configured)
    ends = [*listed, tokenizer.eos_token_id, *_turn_ends(tokenizer)]
    return frozenset(int(token) for token in ends if token is not None)


def template_text(tokenizer: Any) -> str:
    """Text that a tokenizer's chat template may write: its source, and its renderings of prompts and dialogues."""
    if not getattr(tokenizer, "chat_template", None):
        return ""
    rendered = [_rendered_or_none(tokenizer, turns) or "" for turns in ([_USER_MARK], _TURN_MARKS)]
    return "\n".join([str(tokenizer.chat_template), *rendered])


def rendered_formats(tokenizer: Any) -> Mapping[str, Any]:
    """Both formats as plain values: they decide, with the tokenizer, what the tokens of every prompt are."""
    return {
        "prompt": dataclasses.asdict(prompt_format(tokenizer)),
        "dialogue": dataclasses.asdict(dialogue_format(tokenizer)),
    }


def _turn_ends(tokenizer: Any) -> list[int]:
    """The first tokens of their own that the template writes after an answer: the last one, and one before it.

    Where a template ends no turn, that is the token that begins the next one (GLM-4): it ends the answer as well.
    """
    ends: list[int] = []
    for turns in ([_USER_MARK, _ASSISTANT_MARK], [_USER_MARK, _ASSISTANT_MARK, _USER_MARK]):
        rendered = _rendered_or_none(tokenizer, turns) or ""
        after = rendered.partition(_ASSISTANT_MARK)[2].partition(_USER_MARK)[0]
        if after:
            added, unknown = added_tokens(tokenizer), tokenizer.unk_token_id
            ids = tokenizer(after, add_special_tokens=False)["input_ids"]
            ends += [token for token in ids if token in added and token != unknown][:1]
    return list(dict.fromkeys(ends))


def added_tokens(tokenizer: Any) -> dict[int, Any]:
    """Tokens that are more than a piece of text, special or not, by id; those that are white space are not among them.

    Each has its text (`content`) and whether it is `special`, as transformers has them.
    """
    try:
        added = tokenizer.added_tokens_decoder
    except NotImplementedError:  # mistral-common takes no control tokens from text at all
        return {}
    return {int(number): token for number, token in added.items() if token.content.strip()}


def _treatment_of_texts(
    render: Callable[[list[str]], str | None], marks: list[str], around: list[str]
) -> tuple[bool, str]:
    """Whether a template strips texts, and a note if it changes them otherwise.

    Args:
        render: What the template writes for texts; None if it fails.
        marks: Texts.
        around: What it writes before each of them and after the last.
    """

    def as_they_are(texts: list[str]) -> str:
        return "".join(map("".join, zip_longest(around, texts, fillvalue="")))

    padded = [f"\n {mark} \n" for mark in marks]
    rewritten = [f"{mark}{_REWRITTEN}{mark}" for mark in marks]
    written = render(padded)
    strips = written == as_they_are(marks)
    if (strips or written == as_they_are(padded)) and render(rewritten) == as_they_are(rewritten):
        return strips, ""
    return strips, "the model's chat template rewrites texts, which are put in as they are"


def _rendered_or_none(tokenizer: Any, texts: Iterable[str], *, add_generation_prompt: bool = False) -> str | None:
    try:
        return _render_turns(tokenizer, texts, add_generation_prompt=add_generation_prompt)
    except _UnusableTemplateError:
        return None


def _render_turns(tokenizer: Any, texts: Iterable[str], *, add_generation_prompt: bool = False) -> str:
    """The template's text for turns of user and assistant one after the other.

    Raises:
        _UnusableTemplateError: There is no template, or it fails, or draws at random.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise _UnusableTemplateError("the model has no chat template")
    turns = [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)]
    try:
        template = tokenizer.get_chat_template()
        if _DRAWS.search(template):
            raise _UnusableTemplateError(
                "the model's chat template draws at random, so that no prompt could be repeated"
            )
        rendered: str = tokenizer.apply_chat_template(
            turns,
            chat_template=(_PINNED_CLOCK if "strftime_now" in template else "") + template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            kvp_directives=_PINNED_DIRECTIVES,
            **_TEMPLATE_VARIABLES,
        )
        rendered.encode()  # half of a pair of surrogates is no text
    except _UnusableTemplateError:
        raise
    except Exception as error:  # templates are programs of their authors: whatever they raise, there is no format
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise _UnusableTemplateError(f"the model's chat template fails ({lines[0]})") from error
    return rendered
