"""What was damaged is made again, and never judged or registered."""

import dataclasses

import pytest
import torch

from kvpolicy.config.specs import ModelSpec
from kvpolicy.policies.agent import AgentConfig, BatchedAgents
from kvpolicy.policies.policy_set import RECORD, WEIGHTS, PolicySet
from storage.catalog.catalog import Artifact
from storage.tables.parquet import write_rows
from storage.token_ranks import write_token_ranks
from tasks.framework.wholeness import is_whole


@pytest.fixture
def policy(tmp_path) -> Artifact:
    spec = ModelSpec(num_layers=1, num_query_heads=2, num_kv_heads=2, head_dim=4, max_positions=64)
    agents = BatchedAgents(AgentConfig(width=4), num_heads=2, head_dim=4, generator=torch.Generator())
    digest = PolicySet(agents=agents, spec=spec, model_digest="a" * 64, training={}).save(tmp_path / "policy")
    return Artifact(kind="policy_set", digest=digest, name="p", uri=str(tmp_path / "policy"))


@pytest.mark.parametrize("name", [WEIGHTS, RECORD])
def test_a_policy_with_a_flipped_or_missing_file_is_not_whole(home, policy, tmp_path, name):
    assert is_whole(home, policy)
    path = tmp_path / "policy" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert not is_whole(home, policy)
    path.unlink()
    assert not is_whole(home, policy)


def test_rows_that_cannot_be_read_are_not_whole(home, tmp_path):
    prompts = Artifact(kind="prompts", digest="b" * 64, name="p", uri=str(tmp_path / "prompts.parquet"))
    shard = Artifact(kind="evaluation_shard", digest="c" * 64, name="s", uri=str(tmp_path / "shard"))
    assert not is_whole(home, prompts)
    write_rows(tmp_path / "prompts.parquet", [{"a": 1}])
    write_rows(tmp_path / "shard" / "scores.parquet", [{"a": 1}])
    assert is_whole(home, prompts)
    assert not is_whole(home, shard)
    write_rows(tmp_path / "shard" / "costs.parquet", [{"a": 1}])
    assert not is_whole(home, shard)
    write_token_ranks(tmp_path / "shard", [], [])
    assert is_whole(home, shard)
    (tmp_path / "prompts.parquet").write_bytes(b"nothing")
    assert not is_whole(home, prompts)


def test_what_lies_in_the_catalog_alone_is_whole(home, policy):
    assert is_whole(home, dataclasses.replace(policy, uri=""))
    assert not is_whole(home, dataclasses.replace(policy, uri=policy.uri + "-gone"))
