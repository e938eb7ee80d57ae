"""Rankings token by token: what was written is read, a part alone too, and damage is seen."""

import dataclasses

import numpy as np
import pyarrow.parquet as pq
import pytest

from storage.errors import StorageError
from storage.tables.parquet import write_rows
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
    )


def ranking(of: StoredContext, method: str, seed: int) -> StoredRanking:
    draw = np.random.default_rng([seed, len(method), len(of.setting), *of.sample_id.encode()])
    return StoredRanking(
        sample_id=of.sample_id,
        setting=of.setting,
        method=method,
        seed=seed,
        ranks=np.stack([draw.permutation(TOKENS) + 1 for _ in range(HEADS)]).astype(np.int32),
        kept=np.array([[budget] * HEADS for budget in BUDGETS], dtype=np.int32),
    )


@pytest.fixture
def contexts() -> list[StoredContext]:
    return [context("a"), context("a", "query_agnostic", seed=1), context("b'c", seed=2)]


@pytest.fixture
def rankings(contexts) -> list[StoredRanking]:
    return [ranking(own, *name) for own in contexts for name in METHODS]


@pytest.fixture
def folder(tmp_path, contexts, rankings):
    write_token_ranks(tmp_path / "shard", contexts, rankings)
    return tmp_path / "shard"


def read_all(folder, contexts):
    places = dict.fromkeys(METHODS, folder)
    return [read_context(folder, own.sample_id, own.setting, places) for own in contexts]


def digest_of_read(read):
    return digest_of(read, [own for context in read for own in context.rankings])


def test_everything_is_read_as_it_was_written(folder, contexts, rankings):
    read = read_all(folder, contexts)
    assert digest_of_read(read) == digest_of(contexts, rankings)
    for own, again in zip(contexts, read, strict=True):
        names = ("sample_id", "benchmark", "task", "setting", "budgets", "pieces")
        assert [getattr(again, name) for name in names] == [getattr(own, name) for name in names]
        np.testing.assert_array_equal(again.importance, own.importance)
    for ranking, same in zip(rankings, [own for context in read for own in context.rankings], strict=True):
        assert (same.sample_id, same.method, same.seed) == (ranking.sample_id, ranking.method, ranking.seed)
        np.testing.assert_array_equal(same.ranks, ranking.ranks)
        np.testing.assert_array_equal(same.kept, ranking.kept)
    assert sorted(path.name for path in folder.iterdir()) == [CONTEXTS, RANKINGS]


def test_the_lists_say_what_there_is(folder):
    listed = [(row["sample_id"], row["setting"], row["num_heads"], row["num_tokens"]) for row in list_contexts(folder)]
    assert listed == [("a", "query_aware", 3, 7), ("a", "query_agnostic", 3, 7), ("b'c", "query_aware", 3, 7)]
    assert [(row["method"], row["seed"]) for row in list_rankings(folder)] == METHODS * 3


def test_only_the_wanted_rankings_are_read_from_wherever_they_are(folder, contexts, tmp_path):
    tova = ranking(contexts[2], "tova", 0)
    write_token_ranks(tmp_path / "other", [], [tova])
    places = {("kvp", 1): folder, ("tova", 0): tmp_path / "other", ("random", 0): folder}
    read = read_context(folder, "b'c", "query_aware", places)
    assert [(own.method, own.seed) for own in read.rankings] == [("kvp", 1), ("tova", 0)]
    np.testing.assert_array_equal(read.rankings[1].ranks, tova.ranks)
    assert read.find("kvp", 1) is read.rankings[0]
    assert read.find("kvp", 0) is None
    assert read_context(folder, "a", "query_aware", {}).rankings == ()
    assert read_context(folder, "nobody", "query_aware", {}) is None


def test_the_digest_is_of_all_of_it(contexts, rankings):
    first, ranked = contexts[0], rankings[0]
    others = [
        ([dataclasses.replace(first, pieces=("The lamp", "", *first.pieces[2:]))], [ranked]),
        ([dataclasses.replace(first, budgets=(2, 5))], [ranked]),
        ([dataclasses.replace(first, importance=first.importance + 1)], [ranked]),
        ([first], [dataclasses.replace(ranked, ranks=ranked.ranks[:, ::-1].copy())]),
        ([first], [dataclasses.replace(ranked, setting="query_agnostic")]),
        ([first], []),
    ]
    assert len({digest_of(*own) for own in (([first], [ranked]), *others)}) == 7


@pytest.mark.parametrize("name", [CONTEXTS, RANKINGS])
def test_what_is_damaged_lost_or_of_another_shard_is_not_whole(folder, contexts, rankings, tmp_path, name):
    assert is_whole(folder)
    write_token_ranks(tmp_path / "other", contexts[:2], rankings[:2])
    (tmp_path / "other" / name).replace(folder / name)
    assert not is_whole(folder)
    (folder / name).write_bytes(b"PAR1 and nothing")
    assert not is_whole(folder)
    with pytest.raises(StorageError, match=rf"cannot read .*{name}: [^\n]*; delete what is left of it and run"):
        read_all(folder, contexts)
    (folder / name).unlink()
    assert not is_whole(folder)


@pytest.mark.parametrize("name", [CONTEXTS, RANKINGS])
def test_a_single_changed_bit_is_never_read_as_something_else(folder, contexts, rankings, name):
    content, end = (folder / name).read_bytes(), pq.read_metadata(folder / name).serialized_size + 8
    for place in range(4, len(content) - end, 7):  # of all but the footer
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        (folder / name).write_bytes(changed)
        try:
            read = read_all(folder, contexts)
        except StorageError:
            continue
        assert digest_of_read([own for own in read if own is not None]) == digest_of(contexts, rankings)


def test_rankings_of_other_tokens_or_none_at_all_are_refused(folder, contexts, tmp_path):
    shorter = dataclasses.replace(contexts[0], pieces=contexts[0].pieces[1:], importance=contexts[0].importance[:, 1:])
    write_token_ranks(tmp_path / "other", [shorter], [])
    with pytest.raises(StorageError, match="kvp has ranks of shape"):
        read_context(tmp_path / "other", "a", "query_aware", {("kvp", 0): folder})
    write_rows(folder / RANKINGS, [{"sample_id": "a", "setting": "query_aware", "method": "kvp"}])
    with pytest.raises(StorageError, match=rf"cannot read .*{RANKINGS}: [^\n]*; delete what is left"):
        read_all(folder, contexts)
    (folder / RANKINGS).unlink()
    with pytest.raises(StorageError, match=rf"cannot read .*{RANKINGS}: it is lost; delete what is left"):
        list_rankings(folder)


def test_a_place_that_cannot_be_looked_at_is_no_shard_without_rankings(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=rf"cannot read .*{CONTEXTS}: .*Not a directory"):
        list_contexts(tmp_path / "file")


def test_none_are_written_too_and_a_shard_of_before_has_none(tmp_path):
    assert list_contexts(tmp_path) == []
    write_token_ranks(tmp_path, [], [])
    assert is_whole(tmp_path)
    assert list_contexts(tmp_path) == list_rankings(tmp_path) == []
    (tmp_path / RANKINGS).unlink()
    assert not is_whole(tmp_path)


def test_arrays_of_other_shapes_are_refused(contexts, rankings):
    with pytest.raises(StorageError, match="importance has shape"):
        dataclasses.replace(contexts[0], pieces=("one",))
    with pytest.raises(StorageError, match="kvp has ranks of shape"):
        dataclasses.replace(contexts[0], budgets=(2,), rankings=(rankings[0],))
