"""What chat templates write: the same on every day, ends of turns, and templates that are not followed."""

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvpolicy.text.chat_format import PINNED_TIME, dialogue_format, end_ids, prompt_format, rendered_formats
from kvpolicy.text.encoded_sample import encode_message
from tests.kvpolicy.tiny_tokenizers import KINDS

CHAT = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def _tokenizer(template: str | None, **options: Any) -> Any:
    """One token a byte; `<|eot|>` is special and no more than that, `<|plain|>` is not even special."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in ("</s>", "<|eot|>", "<|end|>")])
    backend.add_tokens([AddedToken(name, normalized=False) for name in ("<|plain|>", "<|turn|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", **options)
    tokenizer.chat_template = template
    return tokenizer


def _names(tokenizer: Any, ids: Any) -> set[str]:
    return set(tokenizer.convert_ids_to_tokens(sorted(ids)))


@pytest.mark.parametrize("end", ["<|eot|>", "<|plain|>", "</s>", " <|eot|>\n"])
def test_what_the_template_ends_a_turn_with_ends_an_answer(end: str) -> None:
    tokenizer = _tokenizer(CHAT.replace("<|end|>", end))
    assert "<|eot|>" not in tokenizer.all_special_tokens  # only an added token
    assert tokenizer.convert_ids_to_tokens(prompt_format(tokenizer).end_id) == end.strip()
    assert _names(tokenizer, end_ids(tokenizer)) == {end.strip(), "</s>"}


def test_all_ends_are_taken_together() -> None:
    last_is_different = (
        "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}"
        "{{ '<|eot|>' if loop.last else '<|end|>' }}{% endfor %}"
    )
    tokenizer = _tokenizer(last_is_different)
    configured = tokenizer.convert_tokens_to_ids(["<|plain|>", "</s>"])
    assert _names(tokenizer, end_ids(tokenizer, configured)) == {"<|eot|>", "<|end|>", "<|plain|>", "</s>"}
    assert _names(tokenizer, end_ids(tokenizer, configured[0])) == {"<|eot|>", "<|end|>", "<|plain|>", "</s>"}
    assert tokenizer.convert_ids_to_tokens(prompt_format(tokenizer).end_id) == "<|eot|>"
    assert _names(tokenizer, end_ids(_tokenizer(None))) == {"</s>"}


def test_where_no_turn_is_ended_the_next_one_ends_the_answer() -> None:
    tokenizer = _tokenizer("{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}")
    assert _names(tokenizer, end_ids(tokenizer)) == {"<|turn|>", "</s>"}
    assert tokenizer.convert_ids_to_tokens(prompt_format(tokenizer).end_id) == "<|turn|>"


def test_the_clock_of_templates_stands_still() -> None:
    formats = (
        "%d %B %Y|%A %a %b %h|%H:%M:%S %I %p %f|%j %U %W %w %u %V %G %C|%y/%-m/%-d %-H|%F %T %D %R|%%d %e|%c %x %X"
    )
    template = (
        f"\n   {{% set now = strftime_now('{formats}') %}}\n{{{{ now }}}}\n{{% if now %}}\n  ={{% endif %}}{CHAT}"
    )
    frozen = template.replace(f"strftime_now('{formats}')", f"'{PINNED_TIME.strftime(formats)}'")
    assert rendered_formats(_tokenizer(template)) == rendered_formats(_tokenizer(frozen))
    head = prompt_format(_tokenizer(template)).head
    assert head.startswith(
        "\n26 July 2024|Friday Fri Jul Jul|00:00:00 12 AM 000000|208 29 30 5 5 30 2024 20|24/7/26 0|"
    )
    assert f"{datetime.now():%d %B %Y}" not in head
    # As Granite and SmolLM3 ask for it, also within a macro of the template.
    within = (
        "{% macro today() %}{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}{% endmacro %}"
    )
    assert prompt_format(_tokenizer(f"{within}{{{{ today() }}}} {CHAT}")).head.startswith("26 Jul 2024 <|turn|>")


@pytest.mark.parametrize(
    "draw",
    [
        "{{ ['a', 'b'] | random }}",
        "{{ lipsum(1) }}",
        "{{ [['a']] | map('random') | first }}",
        "{% filter random %}ab{% endfilter %}",
    ],
)
def test_a_template_that_draws_at_random_is_not_used(draw: str) -> None:
    form = prompt_format(_tokenizer(f"{draw}{CHAT}"))
    assert not form.is_chat
    assert "draws at random" in form.note


@pytest.mark.parametrize(
    ("template", "note"),
    [
        (None, "the model has no chat template"),
        ("{{ raise_exception('only for calls\nof tools') }}", "the model's chat template fails (only for calls)"),
        ("{{ messages[0]['content'] | lower }}", "the model's chat template does not write the user's text once and"),
        ("\ud800" + CHAT, "the model's chat template fails ('utf-8' codec can't encode"),
        ("no text", "the model's chat template does not write the user's text once and as it is"),
    ],
)
def test_the_plain_format_says_why_it_is_used(template: str | None, note: str) -> None:
    formats = prompt_format(_tokenizer(template)), dialogue_format(_tokenizer(template))
    assert not formats[0].is_chat and not formats[1].is_chat
    assert formats[0].note.startswith(note)
    assert formats[1].note


def test_a_template_for_one_exchange_is_said_to_write_no_dialogues() -> None:
    tokenizer = _tokenizer("<|turn|>user\n{{ messages[0]['content'] }}<|end|>")
    assert prompt_format(tokenizer).is_chat and not prompt_format(tokenizer).note
    assert dialogue_format(tokenizer).note.endswith("does not write every turn of a dialogue, and alike")


@pytest.mark.parametrize("filters", ["replace('\n', ' ')", "escape", "tojson | trim('\"')", "replace('  ', ' ')"])
def test_a_template_that_rewrites_texts_is_followed_around_them_and_says_so(filters: str) -> None:
    tokenizer = _tokenizer(CHAT.replace("m['content']", f"m['content'] | {filters}"))
    form = prompt_format(tokenizer)
    assert form.is_chat
    assert form.note == "the model's chat template rewrites texts, which are put in as they are"
    assert tokenizer.decode(encode_message("a\n <b>", tokenizer)) == "<|turn|>user\na\n <b><|end|>\n<|turn|>assistant\n"
    assert prompt_format(_tokenizer(CHAT)).note == ""


@pytest.mark.parametrize(
    "written",
    [
        "Title: {{ messages[0].content }}" + CHAT,
        CHAT + "{{ messages[0].content }}",
        CHAT + "{{ messages[-1].content }}",
    ],
)
def test_a_template_that_writes_a_text_twice_is_not_used(written: str) -> None:
    for form in (prompt_format(_tokenizer(written)), dialogue_format(_tokenizer(written))):
        assert not form.is_chat and "does not write" in form.note


@pytest.mark.parametrize(("role", "is_said_of_prompts"), [("user", True), ("assistant", False)])
def test_a_template_that_rewrites_the_turns_of_one_role_says_so_of_dialogues(
    role: str, is_said_of_prompts: bool
) -> None:
    for filters, strips in (("escape", False), ("trim", True)):
        content = f"(m['content'] | {filters} if m['role'] == '{role}' else m['content'])"
        tokenizer = _tokenizer(CHAT.replace("m['content']", content))
        form = dialogue_format(tokenizer)
        assert (form.is_chat, form.strips) == (True, False)
        assert form.note == "the model's chat template rewrites texts, which are put in as they are"
        assert bool(prompt_format(tokenizer).note) == (is_said_of_prompts and not strips)
    assert dialogue_format(_tokenizer(CHAT)).note == ""


@pytest.mark.parametrize("message", ["the lamp", "\n  the lamp\n", "the\n\n  lamp "])
def test_white_space_at_the_ends_is_left_out_where_the_template_does_so(message: str) -> None:
    for template in (CHAT, CHAT.replace("m['content']", "m['content'] | trim")):
        tokenizer = _tokenizer(template)
        assert prompt_format(tokenizer).strips is dialogue_format(tokenizer).strips is ("trim" in template)
        assert not prompt_format(tokenizer).note and not dialogue_format(tokenizer).note
        turns = [{"role": "user", "content": message}]
        rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert encode_message(message, tokenizer) == rendered
    one_sided = prompt_format(_tokenizer(CHAT.replace("m['content']", "m['content'].rstrip()")))
    assert (one_sided.strips, bool(one_sided.note)) == (False, True)


def test_formats_are_the_same_whatever_the_tokenizer_makes_of_text() -> None:
    for kind, make in KINDS.items():
        tokenizer = make()
        tokenizer.chat_template = CHAT
        form = prompt_format(tokenizer)
        expected = prompt_format(_tokenizer(CHAT))
        assert replace(form, end_id=expected.end_id) == expected, kind
        assert tokenizer.convert_ids_to_tokens(form.end_id) == "<|end|>"
