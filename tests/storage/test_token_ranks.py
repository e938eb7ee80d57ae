"""Rankings token by token: what was written is read, a part alone too, and damage is seen."""

import dataclasses

import numpy as np
import pyarrow.parquet as pq
import pytest

from storage.errors import StorageError
from storage.parquet import write_rows
from storage.token_ranks import (
    CONTEXTS,
    RANKINGS,
    StoredContext,
    StoredRanking,
    digest_of,
    is_whole,
    list_contexts,
    list_rankings,
    read_context,
    write_token_ranks,
)

BUDGETS, HEADS, TOKENS = (2, 4), 3, 7
METHODS = [("kvp", 0), ("kvp", 1), ("snapkv", 0)]


def context(sample_id: str, setting: str = "query_aware", *, seed: int = 0) -> StoredContext:
    draw = np.random.default_rng(seed)
    return StoredContext(
        sample_id=sample_id,
        benchmark="ruler",
        task="vt",
        setting=setting,
        budgets=BUDGETS,
        pieces=("The", " lamp", "", "ü", "\n", "<|end|>", " '\""),
        importance=draw.random((HEADS, TOKENS), dtype=np.float32),
        rankings=tuple(
            StoredRanking(
                method=method,
                seed=own,
                ranks=np.stack([draw.permutation(TOKENS) + 1 for _ in range(HEADS)]).astype(np.int32),
                kept=np.array([[budget] * HEADS for budget in BUDGETS], dtype=np.int32),
            )
            for method, own in METHODS
        ),
    )


@pytest.fixture
def contexts() -> list[StoredContext]:
    return [context("a"), context("a", "query_agnostic", seed=1), context("b'c", seed=2)]


@pytest.fixture
def folder(tmp_path, contexts):
    write_token_ranks(tmp_path / "shard", contexts)
    return tmp_path / "shard"


def test_everything_is_read_as_it_was_written(folder, contexts):
    read = [read_context(folder, own.sample_id, own.setting) for own in contexts]
    assert digest_of(read) == digest_of(contexts)
    for own, again in zip(contexts, read, strict=True):
        assert (again.name, again.budgets, again.pieces) == (own.name, own.budgets, own.pieces)
        np.testing.assert_array_equal(again.importance, own.importance)
        for ranking, same in zip(own.rankings, again.rankings, strict=True):
            assert (same.method, same.seed) == (ranking.method, ranking.seed)
            np.testing.assert_array_equal(same.ranks, ranking.ranks)
            np.testing.assert_array_equal(same.kept, ranking.kept)
    assert sorted(path.name for path in folder.iterdir()) == [CONTEXTS, RANKINGS]


def test_the_lists_say_what_there_is(folder):
    listed = [(row["sample_id"], row["setting"], row["num_heads"], row["num_tokens"]) for row in list_contexts(folder)]
    assert listed == [("a", "query_aware", 3, 7), ("a", "query_agnostic", 3, 7), ("b'c", "query_aware", 3, 7)]
    assert [(row["method"], row["seed"]) for row in list_rankings(folder)] == METHODS * 3


def test_only_the_wanted_rankings_are_read(folder):
    read = read_context(folder, "b'c", "query_aware", [("kvp", 1), ("tova", 0)])
    assert [(own.method, own.seed) for own in read.rankings] == [("kvp", 1)]
    assert read.find("kvp", 1) is read.rankings[0]
    assert read.find("kvp", 0) is None
    assert read_context(folder, "a", "query_aware", []).rankings == ()
    assert read_context(folder, "nobody", "query_aware") is None


def test_the_digest_is_of_all_of_it(contexts):
    first = contexts[0]
    ranking = first.rankings[0]
    changed = dataclasses.replace(ranking, ranks=ranking.ranks[:, ::-1].copy())
    others = [
        dataclasses.replace(first, pieces=("The lamp", "", *first.pieces[2:])),
        dataclasses.replace(first, budgets=(2, 5)),
        dataclasses.replace(first, importance=first.importance + 1),
        dataclasses.replace(first, rankings=(changed, *first.rankings[1:])),
        dataclasses.replace(first, rankings=first.rankings[1:]),
    ]
    assert len({digest_of([own]) for own in (first, *others)}) == 6


@pytest.mark.parametrize("name", [CONTEXTS, RANKINGS])
def test_what_is_damaged_lost_or_of_another_shard_is_not_whole(folder, contexts, tmp_path, name):
    assert is_whole(folder)
    write_token_ranks(tmp_path / "other", contexts[:2])
    (tmp_path / "other" / name).replace(folder / name)
    assert not is_whole(folder)
    (folder / name).write_bytes(b"PAR1 and nothing")
    assert not is_whole(folder)
    with pytest.raises(StorageError, match=rf"cannot read .*{name}: [^\n]*; delete what is left of it and run"):
        read_context(folder, "a", "query_aware")
    (folder / name).unlink()
    assert not is_whole(folder)


@pytest.mark.parametrize("name", [CONTEXTS, RANKINGS])
def test_a_single_changed_bit_is_never_read_as_something_else(folder, contexts, name):
    content, end = (folder / name).read_bytes(), pq.read_metadata(folder / name).serialized_size + 8
    for place in range(4, len(content) - end, 7):  # of all but the footer
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        (folder / name).write_bytes(changed)
        try:
            read = [read_context(folder, own.sample_id, own.setting) for own in contexts]
        except StorageError:
            continue
        assert digest_of(own for own in read if own is not None) == digest_of(contexts)


def test_rankings_of_another_shard_or_none_at_all_are_refused(folder, contexts, tmp_path):
    write_token_ranks(tmp_path / "other", [context("a", seed=3)])
    (tmp_path / "other" / RANKINGS).replace(folder / RANKINGS)
    with pytest.raises(StorageError, match=rf"{RANKINGS}: it is not of the same shard as {CONTEXTS}; delete what is"):
        read_context(folder, "a", "query_aware", METHODS)
    write_rows(folder / RANKINGS, [{"sample_id": "a", "setting": "query_aware", "method": "kvp"}])
    with pytest.raises(StorageError, match=rf"cannot read .*{RANKINGS}: [^\n]*; delete what is left"):
        read_context(folder, "a", "query_aware", METHODS)
    (folder / RANKINGS).unlink()
    with pytest.raises(StorageError, match=rf"cannot read .*{RANKINGS}: it is lost; delete what is left"):
        list_rankings(folder)


def test_a_place_that_cannot_be_looked_at_is_no_shard_without_rankings(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=rf"cannot read .*{CONTEXTS}: .*Not a directory"):
        list_contexts(tmp_path / "file")


def test_none_are_written_too_and_a_shard_of_before_has_none(tmp_path):
    assert list_contexts(tmp_path) == []
    write_token_ranks(tmp_path, [])
    assert is_whole(tmp_path)
    assert list_contexts(tmp_path) == list_rankings(tmp_path) == []
    (tmp_path / RANKINGS).unlink()
    assert not is_whole(tmp_path)


def test_arrays_of_other_shapes_are_refused(contexts):
    with pytest.raises(StorageError, match="importance has shape"):
        dataclasses.replace(contexts[0], pieces=("one",))
    with pytest.raises(StorageError, match="kvp has ranks of shape"):
        dataclasses.replace(contexts[0], budgets=(2,))
