"""Soft tokens on disk: what is saved comes back, its digest is its content's, and damage is one line."""

import json
import shutil

import pytest
import torch

from kvpolicy.config.specs import ModelSpec
from kvpolicy.policies.soft_tokens import RECORD, SAVED, WEIGHTS, SoftTokens, load_soft_tokens

SPEC = ModelSpec(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=6, max_positions=128)


def _soft_tokens(seed=0):
    embeddings = torch.randn(32, 24, generator=torch.Generator().manual_seed(seed))
    return SoftTokens(embeddings=embeddings, spec=SPEC, model_digest="ab" * 32, training={"seed": seed, "num_steps": 3})


def test_saved_soft_tokens_come_back(tmp_path):
    tokens = _soft_tokens()
    digest = tokens.save(tmp_path / "set")
    loaded = load_soft_tokens(tmp_path / "set")
    assert torch.equal(loaded.embeddings, tokens.embeddings)
    assert (loaded.spec, loaded.model_digest, loaded.training) == (SPEC, "ab" * 32, {"seed": 0, "num_steps": 3})
    assert loaded.save(tmp_path / "again") == digest == SAVED.digest(tmp_path / "set")


def test_the_digest_is_of_the_content_and_not_of_the_place(tmp_path):
    digest = _soft_tokens().save(tmp_path / "here")
    assert _soft_tokens().save(tmp_path / "there" / "deeper") == digest
    assert _soft_tokens(seed=1).save(tmp_path / "other") != digest


@pytest.mark.parametrize("name", [WEIGHTS, RECORD])
def test_the_digest_notices_one_byte(tmp_path, name):
    digest = _soft_tokens().save(tmp_path)
    content = bytearray((tmp_path / name).read_bytes())
    content[-3] ^= 1
    (tmp_path / name).write_bytes(content)
    assert SAVED.digest(tmp_path) != digest


def _change(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _flip(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "no record": lambda folder: (folder / RECORD).unlink(),
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "cut weights": lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-40]),
    "other weights": lambda folder: _flip(folder / WEIGHTS),
    "foreign record": lambda folder: (folder / RECORD).write_text("[]"),
    "no shape": lambda folder: _change(folder / RECORD, model={}),
    "everything gone": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_soft_tokens_are_one_line_that_names_them(tmp_path, fails_in_one_line, damage):
    folder = tmp_path / "set"
    _soft_tokens().save(folder)
    DAMAGE[damage](folder)
    message = fails_in_one_line(load_soft_tokens, folder)
    assert str(folder) in message and RECORD in message and "train again" in message


def test_soft_tokens_of_a_later_version_say_so(tmp_path, fails_in_one_line):
    _soft_tokens().save(tmp_path)
    _change(tmp_path / RECORD, format_version=2)
    message = fails_in_one_line(load_soft_tokens, tmp_path)
    assert "format 2" in message and "reads 1" in message


def test_soft_tokens_serve_no_other_model(fails_in_one_line):
    _soft_tokens().require_model("ab" * 32)
    message = fails_in_one_line(_soft_tokens().require_model, "cd" * 32)
    assert "abab" in message and "cdcd" in message
