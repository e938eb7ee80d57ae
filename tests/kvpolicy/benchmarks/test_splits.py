"""Who owns what: every item goes to one split, and nothing that can be traced to two."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.benchmarks.splits import in_several, share_out, split_of, stable_seed
from kvpolicy.names import SPLITS

ITEMS = st.lists(st.tuples(st.text(), st.frozensets(st.integers(0, 30).map(str), max_size=3)))


@given(ITEMS)
def test_no_part_is_in_two_splits_and_no_item_is_lost(items: list[tuple[str, frozenset[str]]]) -> None:
    shared, left_out = share_out(items, owner=lambda item: item[0], parts=lambda item: item[1])
    assert tuple(shared) == SPLITS
    assert sum(map(len, shared.values())) + left_out == len(items)
    parts = {split: {part for _, own in kept for part in own} for split, kept in shared.items()}
    assert not in_several(parts.values())
    for split, kept in shared.items():
        assert all(split_of(name) == split for name, _ in kept)
        assert kept == [item for item in items if item in kept]  # in their order
    # What is left out shares a part with an item of another split, by the definition.
    kept_items = [item for kept in shared.values() for item in kept]
    for name, own in items:
        rivals = {part for other, parts in items if split_of(other) != split_of(name) for part in parts}
        assert ((name, own) in kept_items) == (not own & rivals)


def test_half_trains_and_a_quarter_each_validates_and_tests() -> None:
    counts = Counter(split_of(f"text {number}") for number in range(8000))
    assert abs(counts["train"] - 4000) < 200
    assert abs(counts["validation"] - 2000) < 160 and abs(counts["test"] - 2000) < 160


def test_seeds_and_owners_are_the_same_on_every_machine() -> None:
    assert [split_of(text) for text in ("", "a", "b", "c", "ä")] == [
        "validation",
        "train",
        "test",
        "validation",
        "train",
    ]
    assert stable_seed("a", 1) == 174949608156323017618369687619991673517
    assert len({stable_seed(*parts) for parts in (("a", 1), ("a", 2), ("a1",), ("a", "1", ""))}) == 4
