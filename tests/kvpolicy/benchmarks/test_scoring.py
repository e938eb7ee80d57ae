"""Metrics against hand-computed cases, and what holds for all of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.benchmarks.scoring import choose_option, retrieval, rouge_l, score_answer, score_options, string_match
from kvpolicy.errors import InputError
from kvpolicy.text.sample import Sample

SAMPLE = Sample(
    sample_id="ruler/vt/test/0/0/1000",
    benchmark="ruler",
    task="vt",
    split="test",
    context="c",
    question="q",
    answer_prefix="",
    answer=" AAAAA BBBBB",
    references=("AAAAA", "BBBBB"),
    max_new_tokens=30,
)
WORDS = st.lists(st.sampled_from("abcd"), max_size=7)


def test_string_match_counts_substrings_in_any_case() -> None:
    assert string_match("They are Alpha, BETA", ("alpha", "Beta", "gamma", "delta")) == 0.5
    assert string_match("nothing", ("alpha",)) == 0.0
    assert string_match("It is Paris.", ("Paris, France", "paris"), match="any") == 1.0
    assert string_match("It is Rome.", ("Paris, France", "paris"), match="any") == 0.0
    with pytest.raises(InputError, match="at least one reference"):
        string_match("It is Rome.", ())


@given(st.lists(st.text(min_size=1), min_size=1), st.text())
def test_string_match_is_a_share_and_full_for_the_references_themselves(refs: list[str], text: str) -> None:
    score = string_match(text, refs)
    assert score == sum(ref.lower() in text.lower() for ref in refs) / len(refs)
    assert string_match("|".join(refs), refs) == 1.0
    assert (score > 0) == (string_match(text, refs, match="any") == 1.0)


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        # Lin (2004), section 3.1: "police killed the gunman" against "police kill the gunman" shares 3 words of 4.
        ("police kill the gunman", "police killed the gunman", 3 / 4),
        ("the gunman kill police", "police killed the gunman", 2 / 4),
        ("a b c", "a b c", 1.0),
        ("c b a", "a b c", 1 / 3),
        ("a x b", "a b", 2 * 2 / 5),
        ("a", "a b c d", 2 / 5),
        ("x", "a", 0.0),
        ("", "a", 0.0),
        ("A", "a", 0.0),
    ],
)
def test_rouge_l_is_as_computed_by_hand(prediction: str, reference: str, score: float) -> None:
    assert rouge_l(prediction, (reference,)) == pytest.approx(score)
    assert rouge_l(prediction, ("zzz", reference)) == pytest.approx(score)


def _is_subsequence(part: tuple[str, ...], whole: list[str]) -> bool:
    rest = iter(whole)
    return all(word in rest for word in part)


@given(first=WORDS, second=WORDS)
def test_rouge_l_is_the_f1_of_the_longest_common_subsequence(first: list[str], second: list[str]) -> None:
    subsequences = (
        tuple(word for place, word in enumerate(first) if bits >> place & 1) for bits in range(1 << len(first))
    )
    longest = max(len(part) for part in subsequences if _is_subsequence(part, second))
    precision, recall = (longest / max(1, len(words)) for words in (first, second))
    expected = 2 * precision * recall / (precision + recall) if longest else 0.0
    assert rouge_l(" ".join(first), (" ".join(second),)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        (" Paragraph 7", "Paragraph 7", 1.0),
        ("7", "Paragraph 7", 1.0),
        ("Paragraph 17", "Paragraph 7", 0.0),
        ("Paragraph 7 or 9, no, 7", "Paragraph 7", 2 / 3),
        ("none of them", "Paragraph 7", 0.0),
        ("段落12", "段落12", 1.0),
        ("是段落1。", "段落12", 0.0),
    ],
)
def test_the_paragraph_number_is_looked_for(prediction: str, reference: str, score: float) -> None:
    assert retrieval(prediction, (reference,)) == pytest.approx(score)


def test_metrics_need_a_reference(fails_in_one_line) -> None:
    assert "ROUGE-L" in fails_in_one_line(rouge_l, "a", ())
    assert "retrieval" in fails_in_one_line(retrieval, "a", ("no number",))


def test_the_task_decides_the_rule() -> None:
    assert score_answer(SAMPLE, "aaaaa") == 0.5
    assert score_answer(replace(SAMPLE, task="qa_1"), "aaaaa") == 1.0
    assert score_answer(replace(SAMPLE, task="gov_report", references=("a b",)), "a x b") == pytest.approx(0.8)
    assert score_answer(replace(SAMPLE, task="passage_retrieval_zh", references=("段落3",)), "3, 4") == 0.5
    with pytest.raises(InputError, match="task boolq scores no text"):
        score_answer(replace(SAMPLE, task="boolq"), "yes")


def test_the_likeliest_option_is_chosen_and_of_equals_the_first() -> None:
    assert choose_option([-3.0, -1.0, -2.0]) == 1
    assert choose_option([-1.0, -1.0]) == 0
    # -6 over 12 bytes is better than -4 over 4.
    assert choose_option([-4.0, -6.0]) == 0
    assert choose_option([-4.0, -6.0], [4, 12]) == 1


def test_wrong_numbers_of_options_are_refused(fails_in_one_line) -> None:
    assert "at least one" in fails_in_one_line(choose_option, [])
    assert "expected 2 numbers above 0" in fails_in_one_line(choose_option, [-1.0, -2.0], [3])
    assert "expected 2 numbers above 0" in fails_in_one_line(choose_option, [-1.0, -2.0], [3, 0])
    assert "1 log-likelihoods for 0 options" in fails_in_one_line(score_options, SAMPLE, [-1.0])


def test_options_are_scored_by_what_the_task_measures() -> None:
    sample = replace(SAMPLE, task="arc_challenge", options=(" air", " the oceans"), answer=" the oceans")
    assert score_options(sample, [-4.0, -6.0]) == {"accuracy": 0.0, "accuracy_normalised": 1.0}
    assert score_options(replace(sample, task="mmlu"), [-4.0, -6.0]) == {"accuracy": 0.0}
    # Bytes, not letters: two letters of six bytes against five of five.
    wide = replace(sample, options=(" 海洋", " water"), answer=" 海洋")
    assert score_options(wide, [-5.5, -5.0])["accuracy_normalised"] == 1.0


@given(st.lists(st.floats(-1e6, 0), min_size=1, max_size=6), st.floats(-1e3, 1e3))
def test_a_constant_added_to_all_changes_no_choice(values: list[float], constant: float) -> None:
    chosen = choose_option(values)
    assert values[chosen] == max(values)
    shifted = [value + constant for value in values]
    assert shifted[choose_option(shifted)] == max(shifted)
