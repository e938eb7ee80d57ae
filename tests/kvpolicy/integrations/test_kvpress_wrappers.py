"""Every press of kvpress that wraps another: it keeps what our scores say, reckoned here anew, or is refused."""

import inspect
import math
from types import SimpleNamespace

import kvpress
import numpy as np
import pytest
import torch
from kvpress import BasePress, KnormPress, ThinKPress
from kvpress.utils import compute_n_kept

from kvpolicy import load_model
from kvpolicy.attention.prefill import prefill
from kvpolicy.integrations.kvpress import PolicyPress
from kvpolicy.methods.allocation import adaptive_budgets
from kvpolicy.methods.ranking import kept_positions, retention_ranks
from tests.drawn_policy import draw_policy
from tests.kvpolicy.integrations.pressed import indices_of, load_network, pressed

NUM_TOKENS = 90
RATIO = 0.5
BUDGET = compute_n_kept(NUM_TOKENS, RATIO)
ALWAYS = [*range(4), *range(NUM_TOKENS - 16, NUM_TOKENS)]
EPSILON = 1e-4  # CriticalKV's

CURVES = np.stack([np.tile(np.array([0.3, 0.6]), (3, 1))] * 99)  # LU-KV: ratio, layer, head


def _lukv(press):
    wrapper = kvpress.LUKVPress(press, compression_ratio=RATIO)
    wrapper._budget_curves = CURVES  # otherwise fetched by the names of the model and the press
    return wrapper


# What wraps `press` and is right for our scores; `press` is used on a whole prompt.
USABLE = {
    "AdaKVPress": kvpress.AdaKVPress,
    "BlockPress": lambda press: kvpress.BlockPress(press, block_size=NUM_TOKENS),
    "ChunkPress": lambda press: kvpress.ChunkPress(press, chunk_length=NUM_TOKENS),
    "ChunkKVPress": lambda press: kvpress.ChunkKVPress(press, chunk_length=7),
    "ComposedPress": lambda press: kvpress.ComposedPress([press, ThinKPress(0.5)]),
    "CriticalAdaKVPress": kvpress.CriticalAdaKVPress,
    "CriticalKVPress": kvpress.CriticalKVPress,
    "DMSPress": lambda press: kvpress.DMSPress(press, threshold=0.01, sliding_window_size=16),
    "EntropyGatedChunkKVPress": kvpress.EntropyGatedChunkKVPress,
    "KeyRerotationPress": kvpress.KeyRerotationPress,
    "LUKVPress": _lukv,
    "MergingPress": kvpress.MergingPress,
    "PerLayerCompressionPress": lambda press: kvpress.PerLayerCompressionPress(press, [RATIO] * 3),
    "PrefillDecodingPress": lambda press: kvpress.PrefillDecodingPress(prefilling_press=press),
}
# What evicts while decoding, which a policy set does not rank.
DECODING = {
    "CAMPress": kvpress.CAMPress,
    "CompressionRatioDecodingPress": kvpress.CompressionRatioDecodingPress,
    "DecodingPress": kvpress.DecodingPress,
}


def _different_tokens():
    """Not even values of the first layer, which know no position, are equal."""
    return torch.randperm(256, generator=torch.Generator().manual_seed(0))[:NUM_TOKENS]


@pytest.fixture(params=["llama", "qwen3"])
def pressing(request, tiny_model_folder):
    """A model, its whole cache, a policy's scores of it, and the press of that policy."""
    folder = tiny_model_folder(request.param)
    model, tokens = load_model(str(folder), dtype="float32"), _different_tokens()
    policy, context = draw_policy(model), prefill(model, tokens, num_queries=0)
    policy.agents.score_weight *= 8  # shares as uneven as those of attention
    scores = policy.score(context.keys, context.values, torch.arange(NUM_TOKENS)[None])
    return SimpleNamespace(
        network=load_network(folder),
        tokens=tokens,
        context=context,
        policy=policy,
        scores=scores,
        shares=scores.softmax(dim=1),
        press=PolicyPress(compression_ratio=RATIO, policy=policy),
        num_kv_heads=model.spec.num_kv_heads,
    )


def _kept(pressing, wrapper, *, by="keys"):
    """Indices that each head keeps after a prefill: those in the cache that are not masked."""
    layers = pressed(pressing.network, wrapper, pressing.tokens[None])
    part = 0 if by == "keys" else 1
    kept = []
    for layer, entries in zip(pressing.network.model.layers, layers, strict=True):
        first = len(kept)
        whole = getattr(pressing.context, by)[first : first + pressing.num_kv_heads]
        masked = getattr(layer.self_attn, "masked_key_indices", None)
        gone = set() if masked is None else set(zip(masked[1].tolist(), masked[2].tolist(), strict=True))
        kept += [
            [index for index in indices if (head, index) not in gone]
            for head, indices in enumerate(indices_of(whole, entries[part][0]).tolist())
        ]
    return kept


def _best(scores, budget):
    return kept_positions(scores, budget).tolist()


def _uneven(scores, budgets):
    return [_best(head[None], int(budget))[0] for head, budget in zip(scores, budgets, strict=True)]


def _output_norms(pressing):
    """L1 norm of what each entry's value adds to the layer's output, averaged over the query heads of the group."""
    norms = []
    for layer in pressing.network.model.layers:
        weight = layer.self_attn.o_proj.weight
        values = pressing.context.values[len(norms) : len(norms) + pressing.num_kv_heads]
        group = weight.shape[1] // values.shape[2] // len(values)
        for head, value in enumerate(values):
            blocks = weight.split(value.shape[1], dim=1)[head * group : (head + 1) * group]
            norms.append(torch.stack([(value @ block.T).abs().sum(dim=1) for block in blocks]).mean(dim=0))
    return torch.stack(norms).detach()


def _adaptive(pressing):
    """Budgets of AdaKV's algorithm, layer by layer."""
    floor = max(int(BUDGET * 0.2), len(ALWAYS))
    return adaptive_budgets(pressing.shares, BUDGET, floor=floor, num_pools=len(pressing.network.model.layers))


def _critical(pressing, budgets):
    """Half of each head's budget to the best ranked, the rest to the largest products of share and norm."""
    products = (pressing.shares + EPSILON) * _output_norms(pressing)
    products[:, ALWAYS] = torch.inf
    kept = []
    for ranks, product, budget in zip(retention_ranks(pressing.scores), products, budgets, strict=True):
        certain = (ranks <= int(int(budget) * 0.5)).nonzero().flatten().tolist()
        rest = [index for index in product.argsort(descending=True, stable=True).tolist() if index not in certain]
        kept.append(sorted(certain + rest[: int(budget) - len(certain)]))
    return kept


def test_every_wrapper_of_kvpress_is_listed():
    takes_presses = {
        name
        for name in kvpress.__all__
        if inspect.isclass(press := getattr(kvpress, name))
        and issubclass(press, BasePress)
        and any("Press" in str(parameter.annotation) for parameter in inspect.signature(press).parameters.values())
    } - {"CompactorPress"}  # makes its own
    assert takes_presses == {*USABLE, *DECODING}


@pytest.mark.parametrize("name", ["BlockPress", "ChunkPress", "KeyRerotationPress", "MergingPress"])
def test_what_selects_as_the_plain_press_does_keeps_the_same(pressing, name):
    by = "values" if name == "KeyRerotationPress" else "keys"
    assert _kept(pressing, USABLE[name](pressing.press), by=by) == _best(pressing.scores, BUDGET)


@pytest.mark.parametrize("name", ["PrefillDecodingPress", "PerLayerCompressionPress", "ComposedPress"])
def test_what_runs_the_whole_press_keeps_the_same(pressing, name):
    assert _kept(pressing, USABLE[name](pressing.press), by="values") == _best(pressing.scores, BUDGET)


def test_layers_may_have_budgets_of_their_own(pressing):
    kept = _kept(pressing, kvpress.PerLayerCompressionPress(pressing.press, [0.2, 0.5, 0.7]))
    budgets = [compute_n_kept(NUM_TOKENS, ratio) for ratio in (0.2, 0.5, 0.7) for _ in range(pressing.num_kv_heads)]
    assert kept == _uneven(pressing.scores, budgets)


def test_rerotated_keys_are_in_order(pressing):
    layers = pressed(pressing.network, kvpress.KeyRerotationPress(pressing.press), pressing.tokens[None])
    values = torch.cat([values[0] for _, values in layers])
    kept = kept_positions(pressing.scores, BUDGET)
    expected = pressing.context.values.gather(1, kept[..., None].expand(-1, -1, values.shape[2]))
    torch.testing.assert_close(values, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ratio", [RATIO, 0.7])  # at 0.7, always-kept tokens are left to the second stage
def test_criticalkv_weighs_shares_by_the_norms_of_values(pressing, ratio):
    pressing.press.compression_ratio = ratio
    budget = compute_n_kept(NUM_TOKENS, ratio)
    expected = _critical(pressing, [budget] * len(pressing.scores))
    assert _kept(pressing, kvpress.CriticalKVPress(pressing.press)) == expected
    assert expected != _best(pressing.scores, budget)


def test_adakv_compares_shares_between_the_heads_of_a_layer(pressing):
    budgets = _adaptive(pressing)
    assert _kept(pressing, kvpress.AdaKVPress(pressing.press)) == _uneven(pressing.scores, budgets)
    assert len(set(budgets.tolist())) > 1


def test_criticaladakv_does_both(pressing):
    assert _kept(pressing, kvpress.CriticalAdaKVPress(pressing.press)) == _critical(pressing, _adaptive(pressing))


def test_wrappers_may_wrap_each_other(pressing):
    products = (pressing.shares + EPSILON) * _output_norms(pressing)
    sure = retention_ranks(pressing.scores) <= int(BUDGET * 0.5)
    products = products.masked_fill(sure, torch.inf)
    products[:, ALWAYS] = torch.inf
    kept = _kept(pressing, kvpress.AdaKVPress(kvpress.CriticalKVPress(pressing.press)))
    for first in range(0, len(kept), pressing.num_kv_heads):
        heads = slice(first, first + pressing.num_kv_heads)
        least = min(float(row[indices].min()) for row, indices in zip(products[heads], kept[heads], strict=True))
        assert sum(map(len, kept[heads])) == BUDGET * pressing.num_kv_heads
        assert int((products[heads] >= least).sum()) == BUDGET * pressing.num_kv_heads


def test_dms_evicts_shares_below_the_threshold(pressing):
    kept = _kept(pressing, USABLE["DMSPress"](pressing.press))
    for indices, shares in zip(kept, pressing.shares.tolist(), strict=True):
        assert indices == [index for index in range(NUM_TOKENS) if index in ALWAYS or shares[index] >= 0.01]
    assert len({len(indices) for indices in kept}) > 1


def test_lukv_has_budgets_by_head(pressing):
    budgets = [budget for _ in range(3) for budget in (63, 36)]
    assert _kept(pressing, _lukv(pressing.press)) == _uneven(pressing.scores, budgets)


def test_lukv_without_a_curve_of_the_policy_is_refused_by_kvpress(pressing):
    with pytest.raises(KeyError, match=r"No LU-KV budget curve found for model=.* and press='PolicyPress'"):
        _kept(pressing, kvpress.LUKVPress(pressing.press, compression_ratio=RATIO))


def _worth(pressing):
    """Shares added up over the heads of each layer, one list a layer; more than any for tokens that always stay."""
    worth = pressing.shares.clone()
    worth[:, ALWAYS] = 1e6
    return worth.view(-1, pressing.num_kv_heads, NUM_TOKENS).sum(dim=1).tolist()


def test_chunkkv_keeps_the_chunks_of_most_worth_and_those_of_always_kept_tokens(pressing):
    kept = _kept(pressing, USABLE["ChunkKVPress"](pressing.press))
    chunks = [range(start, min(start + 7, NUM_TOKENS)) for start in range(0, NUM_TOKENS, 7)]
    for layer, worth in enumerate(_worth(pressing)):
        by_worth = sorted(chunks, key=lambda chunk: -sum(worth[index] for index in chunk) / len(chunk))
        expected = sorted(index for chunk in by_worth[: int(len(chunks) * (1 - RATIO))] for index in chunk)
        heads = kept[layer * pressing.num_kv_heads : (layer + 1) * pressing.num_kv_heads]
        assert heads == [expected] * pressing.num_kv_heads
        assert set(ALWAYS) <= set(expected)


def _evenness(worth):
    total = sum(worth)
    return -sum(one / total * math.log(one / total) for one in worth) / math.log(len(worth))


def test_entropy_gated_chunks_of_one_worthy_token_are_cut(pressing):
    kept = _kept(pressing, kvpress.EntropyGatedChunkKVPress(pressing.press, low_entropy_chunk_length=6))
    chunks = [list(range(start, start + 10)) for start in range(0, NUM_TOKENS, 10)]
    for layer, worth in enumerate(_worth(pressing)):
        means = [sum(worth[index] for index in chunk) / 10 for chunk in chunks]
        evenness = [_evenness([worth[index] for index in chunk]) for chunk in chunks]
        expected: set[int] = set()
        for place in sorted(range(9), key=lambda place: -means[place]):
            cut = means[place] >= sorted(means)[4] and evenness[place] < sorted(evenness)[4]
            best = sorted(chunks[place], key=lambda index: -worth[index])
            expected |= set(best[: min(6 if cut else 10, BUDGET - len(expected))])
        rest = sorted(set(range(NUM_TOKENS)) - expected, key=lambda index: -worth[index])
        expected |= set(rest[: BUDGET - len(expected)])
        heads = kept[layer * pressing.num_kv_heads : (layer + 1) * pressing.num_kv_heads]
        assert heads == [sorted(expected)] * pressing.num_kv_heads
        assert set(ALWAYS) <= expected


def test_what_is_composed_goes_on_with_what_we_kept(pressing):
    kept = _kept(pressing, kvpress.ComposedPress([pressing.press, KnormPress(0.4)]))
    norms = pressing.context.keys.norm(dim=2)
    expected = [
        sorted(sorted(indices, key=lambda index, norms=norms: float(norms[index]))[: compute_n_kept(BUDGET, 0.4)])
        for norms, indices in zip(norms, _best(pressing.scores, BUDGET), strict=True)
    ]
    assert kept == expected


@pytest.mark.parametrize("others", [[ThinKPress(0.5)], [KnormPress(0.2)]])
def test_what_comes_after_another_press_is_refused(pressing, others, fails_in_one_line):
    composed = kvpress.ComposedPress([*others, pressing.press])
    message = fails_in_one_line(_kept, pressing, composed)
    assert f"{type(others[0]).__name__} before PolicyPress" in message and "put it first" in message


def test_masks_of_entries_that_another_press_moves_are_refused(pressing, fails_in_one_line):
    composed = kvpress.ComposedPress([kvpress.CriticalAdaKVPress(pressing.press), KnormPress(0.2)])
    assert "KnormPress after CriticalAdaKVPress" in fails_in_one_line(_kept, pressing, composed)


@pytest.mark.parametrize("name", ["BlockPress", "ChunkPress"])
def test_parts_of_a_prompt_are_refused(pressing, name, fails_in_one_line):
    wrapper = getattr(kvpress, name)(pressing.press, 20)
    assert "ranks whole prompts" in fails_in_one_line(_kept, pressing, wrapper)


@pytest.mark.parametrize("name", DECODING)
@pytest.mark.parametrize("place", ["alone", "after a prefill", "around AdaKV"])
def test_decoding_is_refused_before_anything_is_run(pressing, name, place, fails_in_one_line):
    inner = kvpress.AdaKVPress(pressing.press) if place == "around AdaKV" else pressing.press
    inner.compression_ratio = 0  # kvpress warns of others
    wrapper = DECODING[name](inner)
    if place == "after a prefill":
        wrapper = kvpress.PrefillDecodingPress(prefilling_press=KnormPress(0.5), decoding_press=wrapper)
    message = fails_in_one_line(wrapper(pressing.network).__enter__)
    assert f"{name} evicts while decoding" in message


def test_dms_while_decoding_is_refused_at_the_prefill(pressing, fails_in_one_line):
    wrapper = kvpress.DMSPress(pressing.press, threshold=0.01, decoding=True)
    assert "DMSPress evicts while decoding" in fails_in_one_line(_kept, pressing, wrapper)


@pytest.mark.parametrize("name", ["ChunkKVPress", "EntropyGatedChunkKVPress", "CriticalAdaKVPress"])
def test_what_chooses_for_a_batch_by_its_first_row_is_refused(pressing, name, fails_in_one_line):
    tokens = torch.stack([pressing.tokens, pressing.tokens.flip(0)])
    message = fails_in_one_line(pressed, pressing.network, USABLE[name](pressing.press), tokens)
    assert f"{name} chooses for all 2 prompts" in message


@pytest.mark.parametrize("name", USABLE)
def test_another_model_is_refused_under_every_wrapper(
    pressing, tiny_model_folder, draw_tokens, name, fails_in_one_line
):
    other = load_network(tiny_model_folder("llama", rms_norm_eps=1e-3))
    message = fails_in_one_line(pressed, other, USABLE[name](pressing.press), draw_tokens(1, NUM_TOKENS))
    assert "trained for model" in message
