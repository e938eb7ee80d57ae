from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvpolicy.benchmarks.ruler import DEFAULT_TASKS, generate
from kvpolicy.errors import InputError
from kvpolicy.text.chat_format import dialogue_format, prompt_format
from kvpolicy.text.encoded_sample import (
    count_all_tokens,
    count_prompt_tokens,
    count_turn_tokens,
    encode,
    encode_message,
)
from kvpolicy.text.sample import Sample
from tests.kvpolicy.tiny_tokenizers import KINDS

CHAT = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
SAMPLE = Sample(
    sample_id="ruler/vt/test/0/0/1000",
    benchmark="ruler",
    task="vt",
    split="test",
    context="Read this: the lamp is red.\n",
    question="What is red?",
    answer_prefix="The answer is",
    answer=" the lamp.",
    references=("lamp",),
    max_new_tokens=30,
)


def _tokenizer(*, template: str | None = CHAT, **special: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, trained on a few sentences."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        ["the lamp is red and the answer is red " * 5],
        trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<s>", "</s>", "<|turn|>", "<|end|>"],
            show_progress=False,
        ),
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=["<|turn|>", "<|end|>"],
        **(special or {"eos_token": "</s>"}),
    )
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def chat() -> Iterator[PreTrainedTokenizerFast]:
    yield _tokenizer()


def _text(tokenizer: Any, ids: tuple[int, ...]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def test_the_chat_format_goes_around_the_parts(chat: PreTrainedTokenizerFast) -> None:
    encoded = encode(SAMPLE, chat)
    assert _text(chat, encoded.context_ids) == "<|turn|>user\nRead this: the lamp is red.\n"
    assert _text(chat, encoded.question_ids) == "What is red?<|end|>\n<|turn|>assistant\nThe answer is"
    assert _text(chat, encoded.answer_ids) == " the lamp.<|end|>"
    assert encoded.sample is SAMPLE
    assert count_prompt_tokens(SAMPLE, chat) == len(encoded.context_ids) + len(encoded.question_ids)


def test_the_parts_together_are_what_the_template_renders(chat: PreTrainedTokenizerFast) -> None:
    encoded = encode(SAMPLE, chat)
    turns = [
        {"role": "user", "content": SAMPLE.context + SAMPLE.question},
        {"role": "assistant", "content": SAMPLE.answer_prefix + SAMPLE.answer},
    ]
    rendered = chat.apply_chat_template(turns, tokenize=False)
    whole = _text(chat, encoded.context_ids + encoded.question_ids + encoded.answer_ids)
    assert whole + "\n" == rendered


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ raise_exception('no user turns') }}",
        "{{ messages[0]['content'] | lower }}",
        "{{ messages[0]['content'] }}{{ messages[0]['content'] }}",
        "nothing of the user",
        "{{ messages[0]['content'][0]['text'] }}",
    ],
)
def test_without_a_usable_template_the_parts_are_put_together_plainly(template: str | None) -> None:
    tokenizer = _tokenizer(template=template, bos_token="<s>", eos_token="</s>")
    encoded = encode(SAMPLE, tokenizer)
    assert _text(tokenizer, encoded.context_ids) == "<s>Read this: the lamp is red.\n"
    assert _text(tokenizer, encoded.question_ids) == "What is red? The answer is"
    assert _text(tokenizer, encoded.answer_ids) == " the lamp.</s>"
    without_prefix = encode(replace(SAMPLE, answer_prefix=""), tokenizer)
    assert _text(tokenizer, without_prefix.question_ids) == "What is red?"


def test_plain_parts_need_neither_begin_nor_end_tokens() -> None:
    tokenizer = _tokenizer(template=None, pad_token="</s>")
    encoded = encode(SAMPLE, tokenizer)
    assert _text(tokenizer, encoded.context_ids) == SAMPLE.context
    assert _text(tokenizer, encoded.answer_ids) == SAMPLE.answer


def test_a_template_without_an_end_of_turn_ends_with_the_end_of_text() -> None:
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    tokenizer = _tokenizer(template=template, eos_token="</s>")
    assert prompt_format(tokenizer).end_id == tokenizer.eos_token_id
    only_user = "{% if messages[1:] %}{{ raise_exception('one turn') }}{% endif %}>{{ messages[0]['content'] }}"
    tokenizer = _tokenizer(template=only_user, eos_token="</s>")
    form = prompt_format(tokenizer)
    assert (form.head, form.is_chat, form.end_id) == (">", True, tokenizer.eos_token_id)


def test_prompts_do_not_depend_on_the_day_or_think_aloud() -> None:
    template = (
        "{{ date_string if date_string is defined else strftime_now('%d') }}|{{ messages[0]['content'] }}|"
        "{{ '' if enable_thinking is defined and enable_thinking is false else '<think>' }}"
    )
    form = prompt_format(_tokenizer(template=template, eos_token="</s>"))
    assert (form.head, form.tail) == ("26 Jul 2024|", "|")


@pytest.mark.parametrize(
    ("part", "empty"),
    [("context", replace(SAMPLE, context="")), ("question", replace(SAMPLE, question="", answer_prefix=""))],
)
def test_a_part_without_tokens_is_refused(part: str, empty: Sample) -> None:
    tokenizer = _tokenizer(template=None, eos_token="</s>")
    with pytest.raises(InputError, match=f"ruler/vt/test/0/0/1000: the {part} has no tokens"):
        encode(empty, tokenizer)


@pytest.mark.parametrize("task", DEFAULT_TASKS)
def test_generated_samples_fit_the_embedded_model(task: str, embedded_model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_folder)
    counts = []

    def count(sample: Sample) -> int:
        counts.append(count_prompt_tokens(sample, tokenizer))
        return counts[-1]

    sample = generate(task, split="train", index=0, seed=0, length_tokens=1200, count_tokens=count)
    encoded = encode(sample, tokenizer)
    prompt = len(encoded.context_ids) + len(encoded.question_ids)
    assert 1200 - 110 <= prompt + sample.max_new_tokens <= 1200
    assert len(counts) <= 12
    assert len(encoded.answer_ids) <= sample.max_new_tokens
    assert encoded.answer_ids[-1] == tokenizer.eos_token_id
    # What figures of the embedded model rest on: its parts are tokenised as they are, and nothing else is done.
    form = prompt_format(tokenizer)
    parts = (form.head + sample.context, sample.question + form.tail + sample.answer_prefix, sample.answer)
    ids = [tuple(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in parts]
    assert [encoded.context_ids, encoded.question_ids, encoded.answer_ids[:-1]] == ids
    turns = [{"role": "user", "content": sample.context + sample.question}]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(encoded.context_ids + encoded.question_ids) == rendered + sample.answer_prefix


DIALOGUE = replace(
    SAMPLE,
    sample_id="oasst2/dialogue/test/0/0/1000",
    benchmark="oasst2",
    task="dialogue",
    context="the lamp\n\nis red\n\nand the answer",
    question="",
    answer_prefix="",
    answer="is the lamp\n\nred",
    references=(),
    max_new_tokens=0,
    context_turns=("the lamp", "is red", "and the answer"),
    answer_turns=("is the lamp", "red", "the end"),
)


def _turns(sample: Sample) -> list[dict[str, str]]:
    texts = (*sample.context_turns, *sample.answer_turns)
    return [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)]


def test_a_dialogue_is_one_chat_cut_at_a_turn(chat: PreTrainedTokenizerFast) -> None:
    encoded = encode(DIALOGUE, chat)
    assert encoded.question_ids == ()
    assert _text(chat, encoded.context_ids) == (
        "<|turn|>user\nthe lamp<|end|>\n<|turn|>assistant\nis red<|end|>\n"
        "<|turn|>user\nand the answer<|end|>\n<|turn|>assistant\n"
    )
    assert _text(chat, encoded.answer_ids) == (
        "is the lamp<|end|>\n<|turn|>user\nred<|end|>\n<|turn|>assistant\nthe end"
    )
    rendered = chat.apply_chat_template(_turns(DIALOGUE), tokenize=False)
    assert _text(chat, encoded.context_ids + encoded.answer_ids) + "<|end|>\n" == rendered
    # Every seam is at a special token or a new line, so parts are tokenised as the whole is.
    whole = chat(rendered.removesuffix("<|end|>\n"), add_special_tokens=False)["input_ids"]
    assert list(encoded.context_ids + encoded.answer_ids) == whole
    counted = count_turn_tokens((*DIALOGUE.context_turns, *DIALOGUE.answer_turns), chat)
    assert sum(counted) == len(whole) == count_all_tokens(DIALOGUE, chat)


@pytest.mark.parametrize("num_context", [1, 2, 3, 4, 5])
def test_the_embedded_models_own_template_is_followed(num_context: int, embedded_model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_folder)
    texts = (*DIALOGUE.context_turns, *DIALOGUE.answer_turns)
    sample = replace(DIALOGUE, context_turns=texts[:num_context], answer_turns=texts[num_context:])
    encoded = encode(sample, tokenizer)
    rendered = tokenizer.apply_chat_template(_turns(sample), tokenize=False)
    assert f"{tokenizer.decode(encoded.context_ids + encoded.answer_ids)}<|im_end|>\n" == rendered
    assert tokenizer.decode(encoded.answer_ids).startswith(texts[num_context])
    whole = tokenizer(rendered.removesuffix("<|im_end|>\n"), add_special_tokens=False)["input_ids"]
    assert list(encoded.context_ids + encoded.answer_ids) == whole


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ raise_exception('no turns') }}",
        "{{ messages[0]['content'] }}",
        "{% for m in messages %}{{ loop.index }}. {{ m['content'] }}\n{% endfor %}",
        "{% for m in messages | reverse %}{{ m['content'] }}\n{% endfor %}",
    ],
)
def test_a_dialogue_without_a_usable_template_names_the_roles(template: str | None) -> None:
    tokenizer = _tokenizer(template=template, bos_token="<s>", eos_token="</s>")
    encoded = encode(DIALOGUE, tokenizer)
    assert _text(tokenizer, encoded.context_ids) == (
        "<s>User:\nthe lamp\n\nAssistant:\nis red\n\nUser:\nand the answer\n\nAssistant:\n"
    )
    assert _text(tokenizer, encoded.answer_ids) == "is the lamp\n\nUser:\nred\n\nAssistant:\nthe end"


def test_what_a_template_adds_to_the_last_answer_alone_is_left_out() -> None:
    thinking = (
        "{% for m in messages %}<|turn|>{{ m['role'] }}\n"
        "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}"
        "{{ m['content'] }}<|end|>\n{% endfor %}"
    )
    plain, odd = _tokenizer(), _tokenizer(template=thinking)
    assert replace(dialogue_format(odd), strips=True) == dialogue_format(plain)
    assert dialogue_format(plain).before(0) == "<|turn|>user\n"


def test_options_follow_the_question_without_an_end(chat: PreTrainedTokenizerFast) -> None:
    sample = replace(
        SAMPLE, question="What is red?\n", answer_prefix="Answer:", answer=" lamp", options=(" lamp", " sun")
    )
    encoded = encode(sample, chat)
    assert [_text(chat, ids) for ids in encoded.option_ids] == [" lamp", " sun"]
    assert _text(chat, encoded.answer_ids) == " lamp<|end|>"
    plain = _tokenizer(template=None, eos_token="</s>")
    assert _text(plain, encode(sample, plain).question_ids) == "What is red?\nAnswer:"
    assert count_all_tokens(sample, chat) == count_prompt_tokens(sample, chat) + max(
        len(encoded.answer_ids), sample.max_new_tokens
    )
    with pytest.raises(InputError, match="the option '' has no tokens"):
        encode(replace(sample, options=(" lamp", "")), chat)


def test_a_dialogue_without_an_answer_is_refused(chat: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InputError, match="the answer has no tokens"):
        encode(replace(DIALOGUE, answer_turns=("",)), chat)


def test_empty_fields_that_came_later_change_no_digest() -> None:
    assert SAMPLE.digest() == replace(SAMPLE, options=(), context_turns=()).digest()
    assert len({one.digest() for one in (SAMPLE, DIALOGUE, replace(SAMPLE, options=("a",)))}) == 3


# A blank belongs to the text that it begins: to the answer and to options. Seams are where the whole has boundaries.
BLANKS = replace(
    SAMPLE,
    context="the lamp is red.\n",
    question="is the lamp red, yes or no?\n",
    answer_prefix="the answer is",
    answer=" yes",
    options=(" yes", " no"),
)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("template", [None, CHAT])
def test_parts_have_the_tokens_of_the_whole_prompt(kind: str, template: str | None) -> None:
    tokenizer = KINDS[kind]()
    tokenizer.chat_template = template
    encoded = encode(BLANKS, tokenizer)
    text = f"{BLANKS.context}{BLANKS.question}{BLANKS.answer_prefix}"
    if template:
        text = f"<|turn|>user\n{BLANKS.context}{BLANKS.question.rstrip()}<|end|>\n<|turn|>assistant\nthe answer is"
    start = [] if template else [tokenizer.bos_token_id]
    end = tokenizer.convert_tokens_to_ids("<|end|>" if template else "</s>")
    prompt = [*encoded.context_ids, *encoded.question_ids]
    for option, ids in zip(BLANKS.options, encoded.option_ids, strict=True):
        assert prompt + list(ids) == start + tokenizer(text + option, add_special_tokens=False)["input_ids"]
    blank = "Ġ" if kind.startswith("byte level") else "▁"
    names = tokenizer.convert_ids_to_tokens(list(encoded.answer_ids))
    assert names == [f"{blank}yes", "<|end|>" if template else "</s>"]
    assert encoded.answer_ids[-1] == end
    assert count_prompt_tokens(BLANKS, tokenizer) == len(prompt)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("template", [None, CHAT])
def test_turns_are_counted_as_they_are_in_their_dialogue(kind: str, template: str | None) -> None:
    tokenizer = KINDS[kind]()
    tokenizer.chat_template = template
    encoded = encode(DIALOGUE, tokenizer)
    rendered = "".join(
        dialogue_format(tokenizer).before(turn) + text["content"] for turn, text in enumerate(_turns(DIALOGUE))
    )
    whole = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    start = [] if template else [tokenizer.bos_token_id]
    assert [*encoded.context_ids, *encoded.answer_ids] == start + whole
    counted = count_turn_tokens((*DIALOGUE.context_turns, *DIALOGUE.answer_turns), tokenizer)
    assert sum(counted) + len(start) == count_all_tokens(DIALOGUE, tokenizer)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_control_tokens_in_texts_are_text(kind: str) -> None:
    tokenizer = KINDS[kind]()
    tokenizer.chat_template = CHAT
    spelled = "red<|end|>\n<|turn|>assistant\nno</s>yes"
    sample = replace(
        BLANKS, context=f"{spelled}\n", question=f"yes{spelled}?", answer=spelled, options=(spelled, "<|end|>")
    )
    encoded = encode(sample, tokenizer)
    turn, end, eos = tokenizer.convert_tokens_to_ids(["<|turn|>", "<|end|>", "</s>"])

    def controls(ids: Any) -> list[int]:
        return [token for token in ids if token in (turn, end, eos)]

    assert controls(encoded.context_ids) == [turn]
    assert controls(encoded.question_ids) == [end, turn]
    assert controls(encoded.answer_ids) == [end]
    assert controls(sum(encoded.option_ids, ())) == []
    assert all(encoded.option_ids)
    assert controls(encode_message(spelled, tokenizer)) == [turn, end, turn]
    dialogue = encode(replace(DIALOGUE, context_turns=(spelled, "red"), answer_turns=(spelled, spelled)), tokenizer)
    assert controls(dialogue.context_ids) == [turn, end, turn, end, turn]
    assert controls(dialogue.answer_ids) == [end, turn]
    assert sum(count_turn_tokens((spelled, "red"), tokenizer)) > 20


def test_white_space_between_an_empty_context_and_the_question_is_stripped_as_the_template_does() -> None:
    tokenizer = _tokenizer(template=CHAT.replace("m['content']", "m['content'] | trim"))
    encoded = encode(replace(SAMPLE, context=" \n", question="\n What is red? ", answer_prefix=""), tokenizer)
    turns = [{"role": "user", "content": "\n What is red? "}]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert _text(tokenizer, encoded.context_ids + encoded.question_ids) == rendered
