"""Budgets by head and by layer: they add up in whole tokens, stay in bounds, and are the best that there are."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.errors import InputError
from kvpolicy.methods.adakv import AdaKV
from kvpolicy.methods.allocation import NUM_ALWAYS_TOKENS, adaptive_budgets, pyramid_budgets
from kvpolicy.methods.learned_heads import LearnedHeads
from kvpolicy.methods.pyramidkv import PyramidKV

ALWAYS = NUM_ALWAYS_TOKENS


def _draw(*shape, seed=0, power=1.0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) ** power


def _kept_share(shares, budgets):
    """Sum of the shares between the always-kept tokens that the heads' best tokens have."""
    middle = shares[:, 4:-16].sort(dim=-1, descending=True).values
    return sum(float(row[: int(budget) - ALWAYS].sum()) for row, budget in zip(middle, budgets, strict=True))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("budget", "floor"), [(22, 20), (23, 21), (24, 24), (20, 20), (26, 0)])
def test_no_other_budgets_keep_more(seed, budget, floor):
    shares = _draw(3, 27, seed=seed, power=4.0) * torch.tensor([[1.0], [3.0], [0.5]])
    found = adaptive_budgets(shares, budget, floor=floor, num_pools=1)
    allowed = [
        budgets for budgets in itertools.product(range(max(floor, ALWAYS), 28), repeat=3) if sum(budgets) == 3 * budget
    ]
    best = max(_kept_share(shares, budgets) for budgets in allowed)
    assert tuple(found.tolist()) in allowed
    assert _kept_share(shares, found) == pytest.approx(best, abs=1e-6)


@settings(max_examples=200, deadline=None)
@given(
    num_pools=st.integers(1, 4),
    heads_of_pool=st.integers(1, 5),
    num_tokens=st.integers(ALWAYS, 120),
    is_tied=st.booleans(),
    data=st.data(),
)
def test_budgets_add_up_in_every_pool_and_grow_with_the_budget(num_pools, heads_of_pool, num_tokens, is_tied, data):
    shares = _draw(num_pools * heads_of_pool, num_tokens, seed=data.draw(st.integers(0, 999)), power=8.0)
    shares = (shares * 3).round() if is_tied else shares
    alpha = data.draw(st.floats(0, 1))
    previous = None
    for budget in sorted(data.draw(st.sets(st.integers(ALWAYS, num_tokens), min_size=1, max_size=4))):
        floor = ALWAYS + int(alpha * (budget - ALWAYS))
        found = adaptive_budgets(shares, budget, floor=floor, num_pools=num_pools)
        assert (found.view(num_pools, -1).sum(dim=1) == budget * heads_of_pool).all()
        assert int(found.min()) >= floor and int(found.max()) <= num_tokens
        assert previous is None or (found >= previous).all()
        previous = found


@pytest.mark.parametrize("level", [0.0, 1.0, -5.0])
def test_heads_that_do_not_differ_get_the_same(level):
    for budget in (20, 33, 60):
        found = adaptive_budgets(torch.full((6, 60), level), budget, floor=0, num_pools=1)
        assert found.tolist() == [budget] * 6


def test_pools_share_nothing_with_each_other():
    shares = _draw(6, 80)
    shares[:2] *= 100
    apart = adaptive_budgets(shares, 40, floor=0, num_pools=3)
    assert torch.equal(
        apart, torch.cat([adaptive_budgets(shares[i : i + 2], 40, floor=0, num_pools=1) for i in (0, 2, 4)])
    )
    together = adaptive_budgets(shares, 30, floor=0, num_pools=1)
    assert together.tolist()[2:] == [20] * 4


def test_the_shares_of_always_kept_tokens_do_not_count():
    shares = torch.zeros(2, 60)
    shares[0, :4] = shares[0, -16:] = 9.0
    shares[1, 30:40] = 0.1
    assert adaptive_budgets(shares, 25, floor=0, num_pools=1).tolist() == [20, 30]


def test_allocation_leaves_the_shares_alone():
    shares = _draw(2, 40)
    before = shares.clone()
    adaptive_budgets(shares, 30, floor=0, num_pools=1)
    assert torch.equal(shares, before)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"budget": 19}, "budget: 19 tokens, expected from 20"),
        ({"budget": 41}, "to 40"),
        ({"floor": 31}, "floor is 31 tokens, expected at most the budget, which is 30"),
        ({"num_pools": 4}, "6 heads do not divide into 4 pools"),
        ({"num_pools": 0}, "do not divide into 0 pools"),
        ({"shares": torch.full((6, 40), torch.nan)}, "NaN"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(fields, message):
    arguments = {"shares": _draw(6, 40), "budget": 30, "floor": 20, "num_pools": 3} | fields
    with pytest.raises(InputError, match=message):
        adaptive_budgets(arguments["shares"], arguments["budget"], **{k: arguments[k] for k in ("floor", "num_pools")})


@settings(max_examples=300, deadline=None)
@given(
    num_layers=st.integers(1, 40),
    num_tokens=st.integers(ALWAYS, 5000),
    window_tokens=st.integers(1, 100),
    beta=st.integers(1, 60),
    data=st.data(),
)
def test_a_pyramid_uses_the_whole_budget_falls_and_grows(num_layers, num_tokens, window_tokens, beta, data):
    shape = {"num_layers": num_layers, "num_tokens": num_tokens, "window_tokens": window_tokens, "beta": beta}
    budget = data.draw(st.integers(ALWAYS, num_tokens))
    found = pyramid_budgets(budget, **shape)
    assert int(found.sum()) == budget * num_layers
    assert found.tolist() == sorted(found.tolist(), reverse=True)
    assert int(found.min()) >= min(budget, max(window_tokens, ALWAYS)) and int(found.max()) <= num_tokens
    if budget < num_tokens:
        assert (pyramid_budgets(budget + 1, **shape) >= found).all()


def test_a_pyramid_is_the_authors_where_their_numbers_divide():
    # 31 layers, window 64: 620 beyond it, of which the last layer has 31 and the first 1209; the step is 1178 / 30.
    found = pyramid_budgets(684, num_layers=31, num_tokens=8000, window_tokens=64, beta=20)
    assert (found[0], found[15], found[-1]) == (1209 + 64, 684, 31 + 64)
    line = torch.linspace(1209, 31, 31, dtype=torch.float64) + 64
    assert (found - line).abs().max() < 1


def test_a_pyramid_over_a_short_context_is_flatter():
    found = pyramid_budgets(100, num_layers=5, num_tokens=120, window_tokens=20, beta=20)
    assert found.tolist() == [120, 110, 100, 90, 80]


@pytest.mark.parametrize("budget", [20, 50, 64])
def test_a_budget_within_the_window_is_equal(make_state, budget):
    state = make_state(150, num_layers=3)
    for method in (PyramidKV(), AdaKV()):
        assert method.allocate(state, method.score(state), budget).tolist() == [budget] * 6
    assert PyramidKV().allocate(state, state.importance, 70).tolist() == [76, 76, 70, 70, 64, 64]


def test_adakv_shares_within_layers_and_keeps_the_safeguard(make_state):
    state = make_state(400, num_layers=2)
    scores = AdaKV(window_tokens=40).score(state)
    scores[0, :360] *= 1e6  # one head of the first layer has all of the attention
    found = AdaKV(window_tokens=40).allocate(state, scores, 140)
    assert found[:2].tolist() == [220, 60]  # 40 of the window and a fifth of the other 100
    assert int(found[2:].sum()) == 280
    assert AdaKV(window_tokens=40, safeguard=1.0).allocate(state, scores, 140).tolist() == [140] * 4


@pytest.mark.parametrize(("pool", "expected"), [("layer", [77, 23, 50, 50]), ("model", [60, 23, 59, 58])])
def test_kvp_heads_shares_a_pool_by_first_choice(make_state, pool, expected):
    class Agents:
        """A head that has 40 good tokens, one that is sure of a single one, and two that prefer none."""

        def score(self, keys, values, positions):
            scores = torch.zeros(4, 200)
            scores[0, 50:90] = 8.0
            scores[1, 50] = 20.0
            return scores

    state = make_state(200)
    method = LearnedHeads(policy=Agents(), safeguard=0.1, pool=pool)
    found = method.allocate(state, method.score(state), 50)
    assert found.tolist() == expected
