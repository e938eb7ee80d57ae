"""OASST2 dialogues: which conversations a tree gives, how they are joined and cut, and what is left out."""

from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written_files import grown_tree, message, messages, oasst2_trees, source_kinds, tree, write_lines

from kvpolicy.benchmarks.oasst2.dialogues import FILLED_SHARE, FUTURE_SHARES, _Chat, dialogues
from kvpolicy.benchmarks.oasst2.trees import read_conversations
from kvpolicy.errors import InputError
from kvpolicy.names import SPLITS
from kvpolicy.text.encoded_sample import count_all_tokens, encode

KINDS = source_kinds("oasst2")


def _ask(ask, tmp_path: Path, trees, **changes):
    return ask("dialogue", "written", data=(f"oasst2={write_lines(tmp_path / 'trees.jsonl', trees)}",), **changes)


def _conversations(ask, tmp_path: Path, *trees):
    return [conversation.turns for conversation in read_conversations(_ask(ask, tmp_path, trees))]


def _reply(own, *replies):
    return {**own, "replies": list(replies)}


def test_the_best_ranked_path_is_taken_and_the_rest_begins_at_other_messages_of_the_user(ask, tmp_path) -> None:
    root = _reply(
        message("0", "ask", "prompter"),
        _reply(message("1", "worse", "assistant", rank=1), message("2", "unused end", "prompter")),
        _reply(
            message("3", "best", "assistant", rank=0),
            message("4", "short way", "prompter"),
            _reply(message("5", "long way", "prompter"), message("6", "last", "assistant")),
        ),
        message("7", "unranked", "assistant"),
    )
    assert _conversations(ask, tmp_path, tree(root)) == [("ask", "best", "long way", "last")]
    root["replies"][0]["replies"][0]["replies"] = [message("8", "other end", "assistant")]
    root["replies"][1]["replies"][0]["replies"] = [message("9", "short end", "assistant", rank=0)]
    assert _conversations(ask, tmp_path, tree(root)) == [
        ("ask", "best", "short way", "short end"),
        ("unused end", "other end"),
        ("long way", "last"),
    ]


@pytest.mark.parametrize(("source", "kind"), KINDS)
def test_no_message_is_in_two_conversations(source: str, kind: str, ask) -> None:
    request = ask("dialogue", kind)
    conversations = read_conversations(request)
    assert len(conversations) > 50
    assert all(len(conversation.turns) % 2 == 0 for conversation in conversations)
    if kind == "written":  # whose texts are all different
        texts = [text for conversation in conversations for text in conversation.turns]
        assert len(texts) == len(set(texts))


@pytest.mark.parametrize("form", ["messages.jsonl.gz", "trees.jsonl.gz", "messages.parquet", "trees.json"])
def test_all_published_forms_read_the_same(form: str, ask, tmp_path) -> None:
    trees = oasst2_trees(6)
    path, rows = tmp_path / form, messages(trees) if form.startswith("messages") else trees
    if form.endswith("parquet"):
        pd.DataFrame(rows).to_parquet(path)
    elif form.endswith("json"):
        pd.Series(rows).to_json(path, orient="values")
    else:
        write_lines(path, rows)
    read = read_conversations(ask("dialogue", "written", data=(f"oasst2={path}",)))
    expected = read_conversations(_ask(ask, tmp_path, trees))
    assert {(one.tree, one.language, one.turns) for one in read} == {
        (one.tree, one.language, one.turns) for one in expected
    }


def test_what_is_left_out_is_counted_by_reason(ask, tmp_path) -> None:
    hello = message("h", "Hello", "prompter")
    answer = message("a", "Hi", "assistant", rank=0)
    trees = [
        tree(_reply({**hello, "message_id": "good"}, answer)),
        tree(_reply({**hello, "message_id": "good"}, answer)),
        tree({**hello, "message_id": "unanswered"}),
        tree(_reply({**hello, "message_id": "blank", "text": " \n"}, answer)),
        tree(_reply({**hello, "message_id": "gone"}, {**answer, "deleted": True})),
        tree(_reply({**hello, "message_id": "early"}, answer), state="growing"),
        tree(_reply({**hello, "message_id": "mixed"}, {**answer, "lang": "es"})),
        tree(_reply({**hello, "message_id": "german", "lang": "de"}, {**answer, "lang": "de"})),
    ]
    request = _ask(ask, tmp_path, trees, language="en")
    assert [conversation.tree for conversation in read_conversations(request)] == ["good"]
    assert request.reported == Counter(
        {
            "dialogue: tree that came before": 1,
            "dialogue: tree without an exchange": 3,
            "dialogue: tree that is not ready for export": 1,
            "dialogue: conversation in several languages": 1,
            "dialogue: conversation that is not in en": 1,
        }
    )


def test_empty_dialogues_give_no_sample(ask, tmp_path) -> None:
    request = _ask(ask, tmp_path, [tree(message("0", "", "prompter"))])
    assert list(dialogues(request)) == []
    assert request.reported == {"dialogue: tree without an exchange": 1}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "a"}, "line 2: neither prompt nor message_id"),
        (tree(_reply(message("0", "a", "prompter"), {"text": 3})), "line 2: text is 3, expected text"),
        (tree(_reply(message("0", "a", "prompter"), message("1", "b", "bystander"))), "line 2: role"),
        (tree(message("0", "a", "prompter", replies="none")), "line 2: role, rank or replies"),
        ({**message("1", "a", "assistant"), "message_tree_id": "t", "parent_id": "0"}, "line 2: its parent '0' is not"),
    ],
)
def test_a_broken_tree_is_named_by_its_line(row, said: str, ask, tmp_path) -> None:
    good = tree(_reply(message("g", "a", "prompter"), message("h", "b", "assistant")))
    with pytest.raises(InputError, match=rf"trees\.jsonl {said}.*OpenAssistant"):
        read_conversations(_ask(ask, tmp_path, [good, row]))


@pytest.mark.parametrize(("source", "kind"), KINDS)
@pytest.mark.parametrize("length", [3000, 8000])
def test_dialogues_are_about_as_long_as_asked_and_a_quarter_is_the_future(source, kind, length, ask) -> None:
    request = ask("dialogue", kind, length_tokens=length)
    samples = list(islice(dialogues(request), 20))
    assert len(samples) >= 3
    for index, sample in enumerate(samples):
        encoded = encode(sample, request.tokenizer)
        total = len(encoded.context_ids) + len(encoded.answer_ids)
        assert total == count_all_tokens(sample, request.tokenizer) <= length
        assert total >= FILLED_SHARE * length - 60
        low, high = FUTURE_SHARES
        assert low - 0.02 <= len(encoded.answer_ids) / total <= high + 0.02
        assert sample.sample_id == f"oasst2/dialogue/train/0/{index}/{length}"
        assert sample.context == "\n\n".join(sample.context_turns)
        assert sample.answer == "\n\n".join(sample.answer_turns)
        assert (len(sample.context_turns) + len(sample.answer_turns)) % 2 == 0
    shares = [len(encode(sample, request.tokenizer).answer_ids) / length for sample in samples]
    assert 0.15 < sum(shares) / len(shares) < 0.35


def test_no_dialogue_mixes_languages_and_no_turn_comes_twice(ask) -> None:
    request = ask("dialogue", "written", length_tokens=2000, split="test")
    languages = {text: one.language for one in read_conversations(request) for text in one.turns}
    samples = list(dialogues(request))
    found = [[languages[text] for text in (*one.context_turns, *one.answer_turns)] for one in samples]
    assert all(len(set(own)) == 1 for own in found)
    assert {own[0] for own in found} == {"en", "de"}
    turns = [text for one in samples for text in (*one.context_turns, *one.answer_turns)]
    assert len(turns) == len(set(turns))
    german = list(dialogues(ask("dialogue", "written", length_tokens=2000, split="test", language="de")))
    assert german and all(languages[text] == "de" for one in german for text in one.context_turns)


def test_training_joins_conversations_again_in_other_orders_and_judging_does_not(ask) -> None:
    once = [len(list(dialogues(ask("dialogue", "written", split=split)))) for split in ("validation", "test")]
    request = ask("dialogue", "written")
    samples = list(islice(dialogues(request), 100))
    counted = Counter(request.reported)
    assert len({one.digest() for one in samples}) == len({one.sample_id for one in samples}) == 100 > 4 * max(once)
    pasts = {text for one in samples for text in one.context_turns}
    futures = {text for one in samples for text in one.answer_turns}
    assert len(pasts & futures) > 0.9 * len(pasts | futures)  # what is past in one is the future in another
    for turns in (one.context_turns + one.answer_turns for one in samples):
        assert len(turns) == len(set(turns))
    list(islice(dialogues(request), 20))
    assert request.reported == counted + counted  # of the first round alone, whatever came after


def test_where_no_order_makes_a_new_dialogue_training_ends_too(ask, tmp_path) -> None:
    question = message("0", "one two three four five six seven eight", "prompter")
    answer = message("1", "four three two one", "assistant")
    request = _ask(ask, tmp_path, [tree(_reply(question, answer))], length_tokens=90)
    assert len(list(dialogues(request))) == 1


def test_a_sample_is_a_function_of_its_request_and_place(ask) -> None:
    def digests(count=4, **changes):
        return [one.digest() for one in islice(dialogues(ask("dialogue", "written", **changes)), count)]

    first = digests()
    assert digests() == first and digests(count=2) == first[:2]
    for other in ({"seed": 1}, {"split": "test"}, {"length_tokens": 5000}):
        assert not set(digests(**other)) & set(first)


def test_the_order_of_files_and_rows_does_not_matter(ask, tmp_path) -> None:
    trees = oasst2_trees(40)
    forward = list(islice(dialogues(_ask(ask, tmp_path, trees)), 20))
    parts = [write_lines(tmp_path / f"{name}.jsonl", part) for name, part in (("a", trees[:15]), ("b", trees[15:]))]
    data = tuple(f"oasst2={path}" for path in reversed(parts))
    assert list(islice(dialogues(ask("dialogue", "written", data=data)), 20)) == forward


def test_a_text_that_two_splits_would_share_is_left_out(ask, tmp_path) -> None:
    trees = oasst2_trees(30)
    for grown in trees[:12]:
        grown["prompt"]["text"] = "This is the very same beginning of a conversation, and it is long enough to tell."
    request = _ask(ask, tmp_path, trees, length_tokens=2000)
    seen = {
        split: {
            text
            for one in islice(dialogues(_ask(ask, tmp_path, trees, split=split, length_tokens=2000)), 20)
            for text in one.context_turns
        }
        for split in SPLITS
    }
    assert not any("very same" in text for texts in seen.values() for text in texts)
    next(dialogues(request))
    assert request.reported["dialogue: conversation with a text that another split has"] == 12


def test_a_first_exchange_that_is_too_long_is_counted(ask, tmp_path) -> None:
    request = _ask(ask, tmp_path, [grown_tree(f"{number}", Random(number)) for number in range(8)], length_tokens=60)
    assert list(dialogues(request)) == []
    (reason,) = request.reported
    assert reason == "dialogue: conversation whose first exchange is longer than 60 tokens"


@settings(max_examples=60, deadline=None)
@given(
    conversations=st.lists(st.lists(st.integers(1, 60), min_size=2, max_size=8).map(lambda n: n[: len(n) // 2 * 2])),
)
def test_a_chat_takes_whole_exchanges_and_never_overflows(conversations: list[list[int]]) -> None:
    chat, taken = _Chat(length_tokens=100), 0
    for number, tokens in enumerate(conversations):
        before = len(chat.turns)
        turns = tuple(f"{number}.{place}" for place in range(len(tokens)))
        if chat.take(turns, tuple(tokens)):
            taken += 1
            own = chat.turns[before:]
            assert own == list(turns[: len(own)]) and len(own) % 2 == 0
            assert len(own) == len(turns) or sum(chat.tokens) >= FILLED_SHARE * 100
            assert chat.is_cut == (len(own) < len(turns))
        else:
            assert len(chat.turns) == before
        assert sum(chat.tokens) <= 100 and len(chat.turns) == len(chat.tokens)
    assert chat.num_conversations == taken
