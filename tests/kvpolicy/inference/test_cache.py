"""The compacted cache against an oracle that never compacts: eager attention with a mask for every layer and head."""

import pytest
import torch

from kvpolicy.attention.prefill import prefill
from kvpolicy.inference.cache import CompactedCache
from kvpolicy.methods.ranking import NOT_KEPT

FAMILIES = ("llama", "llama_mha", "qwen2", "qwen3", "phi3", "mistral", "gemma")
NUM_CONTEXT, NUM_TOKENS = 26, 38
TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}


def _random_kept(num_heads, budget, seed):
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(num_heads, NUM_CONTEXT, generator=generator).argsort(dim=1)
    return order[:, :budget].sort(dim=1).values


def _masked_logits(network, tokens, kept, num_kv_heads):
    """The whole sequence at once, where tokens after the context do not see what their head evicted."""
    size = tokens.shape[0]
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    hooks = []
    for index, layer in enumerate(network.model.layers):
        group = network.config.num_attention_heads // num_kv_heads
        visible = causal.repeat(num_kv_heads * group, 1, 1)
        for query_head in range(num_kv_heads * group):
            head = index * num_kv_heads + query_head // group
            evicted = sorted(set(range(NUM_CONTEXT)) - set(kept[head].tolist()))
            visible[query_head, NUM_CONTEXT:, evicted] = False
        mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)[None]

        def put_mask(module, args, kwargs, mask=mask):
            return args, {**kwargs, "attention_mask": mask}

        hooks.append(layer.self_attn.register_forward_pre_hook(put_mask, with_kwargs=True))
    try:
        with torch.no_grad():
            return network(input_ids=tokens[None], use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()


def _compact(model, tokens, kept, num_new_tokens=NUM_TOKENS - NUM_CONTEXT):
    context = prefill(model, tokens[:NUM_CONTEXT], num_queries=0)
    return CompactedCache(
        context.keys, context.values, kept, num_kv_heads=model.spec.num_kv_heads, num_new_tokens=num_new_tokens
    )


def _run(model, cache, tokens, passes):
    """Logits after every new token, over several passes, at the original positions."""
    logits = []
    for first, last in passes:
        ids = tokens[None, first:last].expand(cache.num_rows, -1)
        positions = torch.arange(first, last).expand(cache.num_rows, -1)
        logits.append(cache.run(model, ids, positions, num_logits=last - first))
    return torch.cat(logits, dim=1)


PASSES = [(26, 32), (32, 36), (36, 37), (37, 38)]


@pytest.mark.parametrize("family", FAMILIES)
def test_evicting_nothing_gives_the_full_models_logits(tiny_model, eager_network, draw_tokens, family):
    model, tokens = tiny_model(family), draw_tokens(NUM_TOKENS)
    everything = torch.arange(NUM_CONTEXT).expand(model.spec.num_heads, -1)
    with torch.no_grad():
        expected = eager_network(family)(input_ids=tokens[None], use_cache=False).logits[0]
    logits = _run(model, _compact(model, tokens, [everything]), tokens, PASSES)[0]
    torch.testing.assert_close(logits, expected[NUM_CONTEXT:], **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [1, 13])
def test_evicting_equals_hiding_head_by_head(tiny_model, eager_network, draw_tokens, family, budget):
    model, tokens = tiny_model(family), draw_tokens(NUM_TOKENS)
    kept = _random_kept(model.spec.num_heads, budget, seed=budget)
    expected = _masked_logits(eager_network(family), tokens, kept, model.spec.num_kv_heads)[NUM_CONTEXT:]
    logits = _run(model, _compact(model, tokens, [kept]), tokens, PASSES)[0]
    torch.testing.assert_close(logits, expected, **TOLERANCE)


def test_the_oracle_notices_evictions_and_which_head_they_are_in(tiny_model, eager_network, draw_tokens):
    model, tokens = tiny_model("llama"), draw_tokens(NUM_TOKENS)
    kept = _random_kept(model.spec.num_heads, 13, seed=0)
    network, kv_heads = eager_network("llama"), model.spec.num_kv_heads
    right = _masked_logits(network, tokens, kept, kv_heads)[NUM_CONTEXT:]
    swapped = _masked_logits(network, tokens, kept.flip(0), kv_heads)[NUM_CONTEXT:]
    everything = torch.arange(NUM_CONTEXT).expand(model.spec.num_heads, -1)
    full = _masked_logits(network, tokens, everything, kv_heads)[NUM_CONTEXT:]
    assert (right - swapped).abs().max() > 0.05
    assert (right - full).abs().max() > 0.05


@pytest.mark.parametrize("family", ["llama", "llama_mha", "gemma"])
def test_ragged_rows_equal_the_same_rows_alone(tiny_model, draw_tokens, family):
    model, tokens = tiny_model(family), draw_tokens(NUM_TOKENS)
    rows = [_random_kept(model.spec.num_heads, budget, seed=budget) for budget in (3, NUM_CONTEXT, 1, 12, 12)]
    together = _run(model, _compact(model, tokens, rows), tokens, PASSES)
    assert together.isfinite().all()
    for row, kept in enumerate(rows):
        alone = _run(model, _compact(model, tokens, [kept]), tokens, PASSES)[0]
        torch.testing.assert_close(together[row], alone, **TOLERANCE)


def _ragged_kept(num_heads, seed, *, least=1, most=14):
    """Another number of tokens in every head, with padding on the left."""
    generator = torch.Generator().manual_seed(seed)
    budgets = torch.randint(least, most + 1, (num_heads,), generator=generator)
    kept = torch.full((num_heads, int(budgets.max())), NOT_KEPT)
    for head, budget in enumerate(budgets.tolist()):
        order = torch.rand(NUM_CONTEXT, generator=generator).argsort()
        kept[head, -budget:] = order[:budget].sort().values
    return kept


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_may_keep_different_numbers(tiny_model, eager_network, draw_tokens, family):
    model, tokens = tiny_model(family), draw_tokens(NUM_TOKENS)
    kept = _ragged_kept(model.spec.num_heads, seed=3)
    assert (kept == NOT_KEPT).any()
    expected = _masked_logits(eager_network(family), tokens, kept, model.spec.num_kv_heads)[NUM_CONTEXT:]
    logits = _run(model, _compact(model, tokens, [kept]), tokens, PASSES)[0]
    torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "llama_mha", "gemma"])
def test_ragged_heads_equal_the_same_rows_alone_in_any_order(tiny_model, draw_tokens, family):
    model, tokens = tiny_model(family), draw_tokens(NUM_TOKENS)
    heads = model.spec.num_heads
    rows = [_ragged_kept(heads, seed=1), _random_kept(heads, 5, seed=2), _ragged_kept(heads, seed=3, least=20, most=25)]
    alone = [_run(model, _compact(model, tokens, [kept]), tokens, PASSES)[0] for kept in rows]
    for order in ((0, 1, 2), (2, 0, 1)):
        together = _run(model, _compact(model, tokens, [rows[row] for row in order]), tokens, PASSES)
        for found, row in zip(together, order, strict=True):
            torch.testing.assert_close(found, alone[row], **TOLERANCE)


def test_rows_with_ragged_heads_can_be_dropped(tiny_model, draw_tokens):
    model, tokens = tiny_model("llama"), draw_tokens(NUM_TOKENS)
    rows = [_ragged_kept(model.spec.num_heads, seed=seed) for seed in (1, 2, 3)]
    expected = _run(model, _compact(model, tokens, rows), tokens, [(26, 32), (32, 38)])
    cache = _compact(model, tokens, rows)
    _run(model, cache, tokens, [(26, 32)])
    cache.keep_rows(torch.tensor([0, 2]))
    torch.testing.assert_close(_run(model, cache, tokens, [(32, 38)]), expected[[0, 2], 6:], **TOLERANCE)


def test_rows_may_continue_differently(tiny_model, eager_network, draw_tokens):
    model, tokens = tiny_model("llama"), draw_tokens(NUM_TOKENS)
    kept = [_random_kept(model.spec.num_heads, budget, seed=budget) for budget in (5, 9)]
    new = draw_tokens(2, 4, seed=7)
    cache = _compact(model, tokens, kept)
    positions = torch.arange(NUM_CONTEXT, NUM_CONTEXT + 4).expand(2, -1)
    logits = cache.run(model, new, positions, num_logits=4)
    for row in range(2):
        whole = torch.cat([tokens[:NUM_CONTEXT], new[row]])
        expected = _masked_logits(eager_network("llama"), whole, kept[row], model.spec.num_kv_heads)[NUM_CONTEXT:]
        torch.testing.assert_close(logits[row], expected, **TOLERANCE)


def test_positions_stay_the_original_ones(tiny_model, draw_tokens):
    # Were new tokens numbered from the number of kept entries, their logits would be others.
    model, tokens = tiny_model("llama"), draw_tokens(NUM_TOKENS)
    kept = [_random_kept(model.spec.num_heads, 8, seed=0)]
    right = _compact(model, tokens, kept).run(model, tokens[None, 26:30], torch.arange(26, 30)[None], num_logits=4)
    wrong = _compact(model, tokens, kept).run(model, tokens[None, 26:30], torch.arange(8, 12)[None], num_logits=4)
    assert (right - wrong).abs().max() > 0.05


def test_cropping_forgets_the_newest_entries(tiny_model, draw_tokens):
    model, tokens = tiny_model("llama"), draw_tokens(NUM_TOKENS)
    rows = [_random_kept(model.spec.num_heads, budget, seed=budget) for budget in (4, 11)]
    expected = _run(model, _compact(model, tokens, rows), tokens, [(26, 32), (32, 38)])
    cache = _compact(model, tokens, rows)
    _run(model, cache, tokens, [(26, 32)])
    other = draw_tokens(2, 6, seed=5)
    cache.run(model, other, torch.arange(32, 38).expand(2, -1), num_logits=1)
    cache.crop(11 + 6)
    torch.testing.assert_close(_run(model, cache, tokens, [(32, 38)]), expected[:, 6:], **TOLERANCE)


def test_bytes_fall_with_the_budget(tiny_model, draw_tokens):
    model, tokens = tiny_model("llama"), draw_tokens(NUM_TOKENS)
    spec = model.spec
    sizes = {}
    for budget in (2, 13, 26):
        cache = _compact(model, tokens, [_random_kept(spec.num_heads, budget, seed=0)], num_new_tokens=4)
        sizes[budget] = cache.num_bytes
        stored = [value for value in vars(cache).values() if isinstance(value, torch.Tensor) and value.dim() == 5]
        assert cache.num_bytes == sum(tensor.untyped_storage().nbytes() for tensor in stored)
    assert sizes == {b: 2 * 4 * spec.num_heads * spec.head_dim * (b + 4) for b in sizes}


def test_the_uncompacted_cache_is_neither_changed_nor_held(tiny_model, draw_tokens):
    model, tokens = tiny_model("llama"), draw_tokens(NUM_TOKENS)
    context = prefill(model, tokens[:NUM_CONTEXT], num_queries=0)
    before = context.keys.clone(), context.values.clone()
    cache = CompactedCache(
        context.keys,
        context.values,
        [torch.arange(NUM_CONTEXT).expand(model.spec.num_heads, -1)],
        num_kv_heads=model.spec.num_kv_heads,
        num_new_tokens=12,
    )
    _run(model, cache, tokens, PASSES)
    assert torch.equal(context.keys, before[0]) and torch.equal(context.values, before[1])
    held = {value.untyped_storage().data_ptr() for value in vars(cache).values() if isinstance(value, torch.Tensor)}
    assert context.keys.untyped_storage().data_ptr() not in held
