"""Policy sets on disk: what is saved comes back, its digest is its content's, and damage is one line."""

import json
import shutil

import pytest
import torch

from kvpolicy.config.specs import ModelSpec
from kvpolicy.errors import InputError
from kvpolicy.policies.agent import AgentConfig, BatchedAgents
from kvpolicy.policies.policy_set import RECORD, SAVED, WEIGHTS, PolicySet, join_agents, load_policy

SPEC = ModelSpec(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=6, max_positions=128)
CONFIG = AgentConfig(width=16, position_dim=8)


def _agents(seed=0, num_heads=4, config=CONFIG, head_dim=6):
    generator = torch.Generator().manual_seed(seed)
    return BatchedAgents(config, num_heads=num_heads, head_dim=head_dim, generator=generator)


def _policy(seed=0):
    return PolicySet(
        agents=_agents(seed), spec=SPEC, model_digest="ab" * 32, training={"seed": seed, "objective": "exact"}
    )


def _cache(num_heads=4, seed=0):
    keys, values = torch.randn(2, num_heads, 15, 6, generator=torch.Generator().manual_seed(seed))
    return keys, values, torch.arange(15)[None]


@pytest.mark.parametrize("position", ["continuous", "table"])
def test_a_saved_set_scores_as_before(tmp_path, position):
    policy = PolicySet(
        agents=_agents(config=AgentConfig(width=16, position_dim=8, position=position)),
        spec=SPEC,
        model_digest="ab" * 32,
        training={"seed": 3, "snapshot": "trace_snapshot-1"},
    )
    digest = policy.save(tmp_path / "set")
    loaded = load_policy(tmp_path / "set")
    assert torch.equal(loaded.score(*_cache()), policy.score(*_cache()))
    assert (loaded.spec, loaded.model_digest, loaded.training) == (policy.spec, policy.model_digest, policy.training)
    assert loaded.agents.config == policy.agents.config
    assert not any(parameter.requires_grad for parameter in loaded.agents.parameters())
    assert loaded.save(tmp_path / "again") == digest == SAVED.digest(tmp_path / "set")


def test_the_digest_is_of_the_content_and_not_of_the_place(tmp_path):
    digest = _policy().save(tmp_path / "here")
    assert _policy().save(tmp_path / "there" / "deeper") == digest
    shutil.copytree(tmp_path / "here", tmp_path / "copied")
    assert SAVED.digest(tmp_path / "copied") == digest
    assert _policy(seed=1).save(tmp_path / "other") != digest


@pytest.mark.parametrize("name", [WEIGHTS, RECORD])
def test_the_digest_notices_one_byte(tmp_path, name):
    digest = _policy().save(tmp_path)
    content = bytearray((tmp_path / name).read_bytes())
    content[-3] ^= 1
    (tmp_path / name).write_bytes(content)
    assert SAVED.digest(tmp_path) != digest


def _cut(path):
    path.write_bytes(path.read_bytes()[:-40])


def _change(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _drop(path, name):
    record = json.loads(path.read_text())
    del record[name]
    path.write_text(json.dumps(record))


DAMAGE = {
    "no record": lambda folder: (folder / RECORD).unlink(),
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "cut weights": lambda folder: _cut(folder / WEIGHTS),
    "cut record": lambda folder: _cut(folder / RECORD),
    "foreign record": lambda folder: (folder / RECORD).write_text("[]"),
    "other shape": lambda folder: _change(folder / RECORD, agent={"width": 8}),
    "other heads": lambda folder: _change(
        folder / RECORD, model={**json.loads((folder / RECORD).read_text())["model"], "num_layers": 3}
    ),
    "no model digest": lambda folder: _drop(folder / RECORD, "model_digest"),
    "no training": lambda folder: _drop(folder / RECORD, "training"),
    "model digest of another kind": lambda folder: _change(folder / RECORD, model_digest=None),
    "training of another kind": lambda folder: _change(folder / RECORD, training=None),
    "everything gone": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_set_is_one_line_that_names_it(tmp_path, fails_in_one_line, damage):
    folder = tmp_path / "set"
    _policy().save(folder)
    DAMAGE[damage](folder)
    message = fails_in_one_line(load_policy, folder)
    assert str(folder) in message and RECORD in message


def test_a_set_of_a_later_version_says_so(tmp_path, fails_in_one_line):
    _policy().save(tmp_path)
    _change(tmp_path / RECORD, format_version=2)
    message = fails_in_one_line(load_policy, tmp_path)
    assert "format 2" in message and "reads 1" in message


def test_a_set_serves_no_other_model(fails_in_one_line):
    policy = _policy()
    policy.require_model("ab" * 32)
    message = fails_in_one_line(policy.require_model, "cd" * 32)
    assert "abab" in message and "cdcd" in message


def test_scoring_records_no_gradients():
    assert not _policy().score(*_cache()).requires_grad


def test_joined_groups_are_their_heads_in_order():
    groups = [_agents(seed=1, num_heads=1), _agents(seed=2, num_heads=3)]
    joined = join_agents(groups)
    keys, values, positions = _cache()
    expected = torch.cat([groups[0](keys[:1], values[:1], positions), groups[1](keys[1:], values[1:], positions)])
    assert joined.num_heads == 4
    torch.testing.assert_close(joined(keys, values, positions), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [_agents(), _agents(config=AgentConfig(width=8, position_dim=8))],
        [_agents(), _agents(head_dim=4)],
    ],
    ids=["none", "widths", "head-dims"],
)
def test_groups_that_do_not_fit_are_refused(fails_in_one_line, groups):
    assert "one configuration" in fails_in_one_line(join_agents, groups)


def test_weights_that_read_but_are_not_what_was_saved_are_refused(tmp_path):
    _policy(3).save(tmp_path)
    content = bytearray((tmp_path / WEIGHTS).read_bytes())
    content[-5] ^= 1
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(InputError, match="delete it and train again"):
        load_policy(tmp_path)
