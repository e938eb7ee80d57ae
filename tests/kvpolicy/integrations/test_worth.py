"""The order of our ranking in numbers like attention, for libraries that multiply, add up and compare them."""

import pytest
import torch

from kvpolicy.integrations.worth import ALWAYS_KEPT_WORTH, worth_of_entries
from kvpolicy.methods.ranking import retention_ranks

CONTESTED = slice(4, -16)


def _draw(num_tokens, scale):
    return scale * torch.randn(3, num_tokens, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("num_tokens", [20, 21, 300, 20_000])
@pytest.mark.parametrize("scale", [0.0, 1e-8, 1.0, 30.0, 1e4])
def test_the_order_is_that_of_the_ranking_and_no_two_are_equal(num_tokens, scale):
    scores = _draw(num_tokens, scale).round(decimals=2 if scale == 1.0 else 20)  # to have ties as well
    worth = worth_of_entries(scores)
    descending = worth.sort(dim=1, descending=True)
    assert (descending.values.diff(dim=1) < 0).all() and (worth > 0).all()
    places = torch.arange(1, num_tokens + 1).expand(3, -1)
    assert torch.equal(torch.empty_like(places).scatter_(1, descending.indices, places), retention_ranks(scores))


def test_it_is_the_share_of_each_entry_in_its_head():
    scores = _draw(300, 2.0)
    worth = worth_of_entries(scores)
    torch.testing.assert_close(worth[:, CONTESTED], scores.softmax(dim=1)[:, CONTESTED], rtol=1e-5, atol=0)


def test_always_kept_tokens_are_beyond_any_share():
    worth = worth_of_entries(_draw(300, 30.0))
    always = torch.cat([worth[:, :4], worth[:, -16:]], dim=1)
    torch.testing.assert_close(always, torch.full_like(always, ALWAYS_KEPT_WORTH))
    assert (worth[:, CONTESTED] <= 1).all()


def test_infinities_and_nan_of_always_kept_tokens_do_not_spread():
    scores = _draw(300, 1.0)
    scores[:, 0], scores[:, 50], scores[:, 60] = torch.nan, torch.inf, -torch.inf
    worth = worth_of_entries(scores)
    assert torch.isfinite(worth).all()
    assert torch.equal(worth[:, CONTESTED].argmax(dim=1), torch.full((3,), 46))
    assert torch.equal(worth.argmin(dim=1), torch.full((3,), 60))


def test_few_tokens_and_nan_are_refused(fails_in_one_line):
    assert "expected from 20" in fails_in_one_line(worth_of_entries, _draw(19, 1.0))
    scores = _draw(100, 1.0)
    scores[1, 9] = torch.nan
    assert "1 of 240 are NaN" in fails_in_one_line(worth_of_entries, scores)
