"""The batched network: equal to its heads one at a time, to a plain reading of the paper, and sound at any position."""

import pytest
import torch
from torch import nn

import kvpolicy.policies.agent as module
from kvpolicy.policies.agent import AgentConfig, BatchedAgents, continuous_position_features

CONFIGS = [AgentConfig(width=24, position_dim=8), AgentConfig(width=24, position="table", position_dim=8)]
IDS = ["continuous", "table"]


@pytest.fixture(autouse=True)
def short_table(monkeypatch):
    monkeypatch.setattr(module, "PAPER_TABLE_ROWS", 100)


def _make(config, num_heads=3, head_dim=6, seed=0):
    agents = BatchedAgents(
        config, num_heads=num_heads, head_dim=head_dim, generator=torch.Generator().manual_seed(seed)
    )
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():  # gains and shifts begin at 1 and 0, which would hide them
        for parameter in agents.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        agents.fit_inputs(*(torch.randn(2, num_heads, 50, head_dim, generator=generator) * 3 + 1))
    return agents


def _draw(num_heads=3, num_tokens=20, head_dim=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, num_heads, num_tokens, head_dim, generator=generator)
    return keys, values, torch.arange(num_tokens)[None] * 3


def _alone(agents, head, config):
    single = BatchedAgents(config, num_heads=1, head_dim=agents.head_dim, generator=torch.Generator())
    single.load_state_dict({name: tensor[head : head + 1] for name, tensor in agents.state_dict().items()})
    return single


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_batched_agents_are_their_heads_one_at_a_time(config):
    agents = _make(config)
    keys, values, positions = _draw()
    scores = agents(keys, values, positions)
    for head in range(3):
        own = slice(head, head + 1)
        alone = _alone(agents, head, config)(keys[own], values[own], positions)
        torch.testing.assert_close(scores[own], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_an_agent_is_the_papers_network(config):
    # Built from torch's own layers, as the paper describes them.
    agents = _make(config)
    weights = {name: tensor[1] for name, tensor in agents.state_dict().items()}
    keys, values, positions = _draw()

    def standardised(inputs, name):
        return (inputs[1] - weights[f"{name}_mean"]) * weights[f"{name}_scale"]

    def block(inputs, name):
        linear = nn.functional.linear(inputs, weights[f"{name}_weight"].T, weights[f"{name}_bias"][0])
        return nn.functional.layer_norm(
            linear, linear.shape[-1:], weights[f"{name}_gain"][0], weights[f"{name}_shift"][0]
        )

    if config.position == "table":
        features = weights["position_table"][positions[0]]
    else:
        features = continuous_position_features(positions, 8)[0]
    position = nn.functional.layer_norm(features, (8,), weights["position_gain"][0], weights["position_shift"][0])
    hidden = torch.cat(
        [block(standardised(keys, "key"), "key"), block(standardised(values, "value"), "value"), position], dim=-1
    )
    hidden = nn.functional.silu(block(hidden, "hidden1"))
    hidden = nn.functional.silu(block(hidden, "hidden2"))
    expected = (hidden @ weights["score_weight"])[:, 0]
    torch.testing.assert_close(agents(keys, values, positions)[1], expected, atol=1e-5, rtol=1e-5)


def test_inputs_are_standardised_channel_by_channel_and_head_by_head():
    agents = _make(CONFIGS[0])
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 3, 500, 6, generator=generator)
    agents.fit_inputs(keys, values)
    small = agents(keys[:, :20], values[:, :20], torch.arange(20)[None])
    scale = torch.tensor([1, 50, 0.1, 3, 1, 20.0]) * torch.tensor([1, 2, 5.0])[:, None, None]
    shift = torch.tensor([0, 100, -7, 0, 1, 9.0])
    agents.fit_inputs(keys * scale + shift, values)
    large = agents((keys * scale + shift)[:, :20], values[:, :20], torch.arange(20)[None])
    torch.testing.assert_close(large, small, atol=1e-3, rtol=1e-3)


def test_a_channel_that_never_changes_stays_finite():
    agents = _make(CONFIGS[0])
    keys, values, positions = _draw()
    keys[..., 2] = 5.0
    agents.fit_inputs(keys, values)
    assert agents(keys, values, positions).isfinite().all()


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_a_heads_gradient_touches_its_own_weights_only(config):
    agents = _make(config)
    agents(*_draw())[1].sum().backward()
    for name, parameter in agents.named_parameters():
        assert (parameter.grad[0] == 0).all() and (parameter.grad[2] == 0).all(), name
    assert agents.hidden1_weight.grad[1].abs().sum() > 0


def test_a_token_is_scored_by_itself_alone():
    agents = _make(CONFIGS[0])
    keys, values, positions = _draw()
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    shuffled = agents(keys[:, order], values[:, order], positions[:, order])
    torch.testing.assert_close(shuffled, agents(keys, values, positions)[:, order], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_key_value_and_position_all_matter(config):
    agents = _make(config)
    keys, values, positions = _draw()
    scores = agents(keys, values, positions)
    for changed in [(keys + 1, values, positions), (keys, values * -1, positions), (keys, values, positions + 20)]:
        assert ((agents(*changed) - scores).abs() > 1e-4).float().mean() > 0.9


def test_the_papers_size(monkeypatch):
    monkeypatch.setattr(module, "PAPER_TABLE_ROWS", 6_000)
    paper = BatchedAgents(
        AgentConfig.named("paper"), num_heads=1, head_dim=128, generator=torch.Generator().manual_seed(0)
    )
    sizes = {name: parameter.numel() for name, parameter in paper.named_parameters()}
    assert sizes.pop("position_table") == 6_000 * 32
    # Two Linear(128 -> 256), Linear(544 -> 256), Linear(256 -> 256), each with bias and LayerNorm; LayerNorm of the
    # position; one score without a bias, which no ranking would notice. With the table 465,728: "0.5 M".
    linear = 2 * 128 * 256 + (256 + 256 + 32) * 256 + 256 * 256 + 4 * 256
    assert sum(sizes.values()) == linear + 4 * 2 * 256 + 2 * 32 + 256 == 273_728


def test_named_agents(fails_in_one_line):
    assert AgentConfig.named("default") == AgentConfig()
    assert AgentConfig.named("small").width < AgentConfig().width
    assert AgentConfig.named("paper") == AgentConfig(width=256, position="table", position_dim=32, standardise=False)
    message = fails_in_one_line(AgentConfig.named, "huge")
    assert "'huge'" in message and "default, small, paper" in message


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("heads_per_block", [1, 2])
def test_blocks_of_heads_change_neither_scores_nor_gradients(monkeypatch, config, shared, heads_per_block):
    agents = _make(config)
    keys, values, positions = _draw()
    positions = positions if shared else positions + torch.arange(3)[:, None]
    inputs = [keys.requires_grad_(), values.requires_grad_(), *agents.parameters()]
    results = []
    for block_bytes in (2**30, heads_per_block * 20 * 24 * 4):
        monkeypatch.setattr(module, "_BLOCK_BYTES", block_bytes)
        scores = agents(keys, values, positions)
        gradients = torch.autograd.grad((scores * torch.arange(20.0)).sum(), inputs)
        results.append((scores, *gradients))
    assert module._heads_per_block(keys, config.width) == heads_per_block
    for whole, blocked in zip(*results, strict=True):
        torch.testing.assert_close(blocked, whole, atol=1e-5, rtol=1e-5)


def test_scoring_without_gradients_is_the_same():
    agents = _make(CONFIGS[0])
    with_gradients = agents(*_draw())
    with torch.inference_mode():  # where activations are overwritten
        torch.testing.assert_close(agents(*_draw()), with_gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keys_give_float32_scores_near_the_full_ones(dtype):
    agents = _make(CONFIGS[0])
    keys, values, positions = _draw()
    scores = agents(keys.to(dtype), values.to(dtype), positions)
    assert scores.dtype == torch.float32
    full = agents(keys, values, positions)
    assert (scores - full).abs().mean() < 0.1 * full.std()


def test_continuous_positions_are_finite_and_distinct_far_beyond_training():
    positions = torch.tensor([[0, 1, 2, 100, 5_999, 6_000, 131_072, 1_000_000]])
    features = continuous_position_features(positions, 32)[0]
    assert features.shape == (8, 32)
    assert features.isfinite().all() and features.abs().max() < 10
    distances = torch.cdist(features, features) + torch.eye(8) * 10
    assert distances.min() > 0.05
    agents = _make(CONFIGS[0])
    keys, values, _ = _draw(num_tokens=8)
    assert agents(keys, values, positions).isfinite().all()


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_heads_may_have_positions_of_their_own(config):
    agents = _make(config)
    keys, values, _ = _draw()
    positions = torch.stack([torch.randperm(99, generator=torch.Generator().manual_seed(i))[:20] for i in range(3)])
    positions = positions.sort(dim=-1).values
    scores = agents(keys, values, positions)
    for head in range(3):
        shared = agents(keys, values, positions[head : head + 1])[head]
        torch.testing.assert_close(scores[head], shared, atol=1e-6, rtol=1e-6)
    alike = agents(keys, values, positions[:1].expand(3, -1))
    torch.testing.assert_close(alike, agents(keys, values, positions[:1]), atol=1e-6, rtol=1e-6)


def test_positions_past_the_table_are_refused(fails_in_one_line):
    agents = _make(CONFIGS[1])
    keys, values, positions = _draw()
    assert agents(keys, values, positions + 42).isfinite().all()  # 99 is the last row
    message = fails_in_one_line(agents, keys, values, positions + 43)
    assert "position 100" in message and "100 rows" in message


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"width": 0}, "width is 0"),
        ({"position_dim": 5}, "position_dim is 5"),
        ({"position_dim": 2}, "position_dim is 2"),
    ],
)
def test_wrong_shapes_are_named(fails_in_one_line, wrong, named):
    assert named in fails_in_one_line(AgentConfig, **wrong)


def test_an_unknown_kind_of_position_is_named(fails_in_one_line, unchecked):
    assert "'rotary'" in fails_in_one_line(AgentConfig, position="rotary")


def test_a_seed_gives_the_same_weights_and_no_global_state_is_used():
    before = torch.random.get_rng_state()
    first, second, third = (
        BatchedAgents(CONFIGS[0], num_heads=2, head_dim=4, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.key_weight, second.key_weight)
    assert not torch.equal(first.key_weight, third.key_weight)
    assert not torch.equal(first.key_weight[0], first.key_weight[1])
