"""Registering models and writing prompts."""

import dataclasses
import json
import shutil
from contextlib import nullcontext as does_not_raise
from pathlib import Path

import pytest

from kvpolicy.digests import digest_json
from kvpolicy.errors import InputError
from kvpolicy.evaluation import EvaluateConfig
from kvpolicy.policies.agent import AgentConfig
from kvpolicy.presets.pipeline_config import PipelineConfig
from kvpolicy.text.chat_format import rendered_formats
from kvpolicy.text.encoded_sample import count_prompt_tokens
from kvpolicy.training.policy_training import TrainConfig
from kvpolicy.training.soft_token_training import SoftTokenConfig
from storage.catalog.catalog import Catalog
from storage.home import Home
from storage.tables.parquet import write_rows
from tasks.checks import check_prompts
from tasks.inputs.loaded_model import load_model
from tasks.inputs.samples import read_encoded, read_samples, sample_row
from tasks.model import register_model
from tasks.prompts import prompts_stage, write_prompts
from tests.conftest import CHAT_TEMPLATE
from tests.tasks.conftest import PROMPTS


def test_a_model_is_registered_once(home, model, model_folder):
    assert register_model.fn(home, str(model_folder), "float32") == model
    (row,) = Catalog(home).rows("models")
    assert (row["model_id"], row["digest"], row["source"]) == (model.artifact_id, model.digest, str(model_folder))
    assert (row["num_layers"], row["num_query_heads"], row["num_kv_heads"], row["head_dim"]) == (2, 4, 2, 16)
    assert (row["architecture"], row["max_positions"], model.num_heads) == ("LlamaForCausalLM", 2048, 4)
    assert Catalog(home).artifact(model.artifact_id).kind == "model"


def test_a_process_loads_a_model_once(model):
    assert load_model(model) is load_model(model)


def test_a_model_that_is_not_there_leaves_nothing(home, model, tmp_path):
    with pytest.raises(InputError, match="no folder, GGUF file or hub id"):
        register_model.fn(home, str(tmp_path / "none"), "float32")
    assert [row["model_id"] for row in Catalog(home).rows("models")] == [model.artifact_id]


def test_prompts_are_written_once_and_read_as_they_were(home, prompts, model):
    train = prompts("train", 2)
    assert prompts("train", 2) == train
    samples = read_samples(train)
    assert [sample.task for sample in samples] == ["niah_single_1", "vt"] * 2
    assert {sample.split for sample in samples} == {"train"}
    assert len({sample.sample_id for sample in samples}) == train.num_samples == 4
    tokenizer = load_model(model).tokenizer
    for sample in samples:
        assert count_prompt_tokens(sample, tokenizer) + sample.max_new_tokens <= 1200
        assert isinstance(sample.references, tuple)
    runs = Catalog(home).rows("runs", "stage = 'prompts' AND outcome = 'completed'")
    assert len([row for row in runs if '"split":"train"' in row["parameters_json"].replace(" ", "")]) == 1


def test_prompts_differ_by_split_and_seed(prompts):
    written = [prompts("train"), prompts("test"), prompts("validation"), prompts("train", seed=1)]
    contexts = [sample.context for part in written for sample in read_samples(part)]
    assert len({part.artifact_id for part in written}) == 4
    assert len(set(contexts)) == len(contexts)


def _with_template(folder, template, tmp_path):
    """The model with another chat template."""
    copied = shutil.copytree(folder, tmp_path / "model")
    (copied / "chat_template.jinja").write_text(template)
    return copied


def _asked(model):
    formats = rendered_formats(load_model(model).tokenizer)
    return {"texts": {}, "formats": formats, "split": "test", "num_samples_per_task": 1, "seed": 0}


def test_what_the_template_rendered_is_under_the_key_and_the_same_on_every_day(model_folder, tmp_path, caplog):
    home = Home.open(tmp_path / "home")
    template = f"{{{{ strftime_now('%d %B %Y') }}}} {CHAT_TEMPLATE}"
    dated = register_model.fn(home, str(_with_template(model_folder, template, tmp_path)), "float32")
    with caplog.at_level("INFO", logger="kvpolicy"):
        part, _ = write_prompts.fn(home, dated, PROMPTS, **_asked(dated))
    assert "format" not in caplog.text
    (row,) = Catalog(home).rows("runs", "stage = 'prompts'")
    head = json.loads(row["parameters_json"])["formats"]["prompt"]["head"]
    assert head == "26 July 2024 <|turn|>user\n"
    metadata = Catalog(home).artifact(part.artifact_id).metadata
    assert metadata["formats"] == {"prompt": {"is_chat": True, "note": ""}}
    assert metadata["formats_digest"] == part.formats_digest
    tokenizer = load_model(dated).tokenizer
    assert tokenizer.decode(read_encoded(part, dated)[0].context_ids).startswith(head)


def test_another_format_makes_other_keys_and_other_sets(model, prompts):
    part, formats = prompts("test"), rendered_formats(load_model(model).tokenizer)
    later = {**formats, "prompt": {**formats["prompt"], "head": "27 July 2024"}}
    common = {"texts": {}, "split": "test", "num_samples_per_task": 1, "seed": 0}
    stages = [prompts_stage(model, PROMPTS, formats=each, **common) for each in (formats, later)]
    assert stages[0].key != stages[1].key
    elsewhere = dataclasses.replace(part, formats_digest=digest_json(later))
    with pytest.raises(InputError, match=f"prompts {part.artifact_id} were written in another format"):
        read_encoded(elsewhere, model)
    assert read_encoded(dataclasses.replace(part, formats_digest=""), model) == read_encoded(part, model)


def test_prompts_without_a_chat_format_say_so(model_folder, tmp_path, caplog):
    home = Home.open(tmp_path / "home")
    template = "{{ raise_exception('only with tools') }}"
    plain = register_model.fn(home, str(_with_template(model_folder, template, tmp_path)), "float32")
    with caplog.at_level("INFO", logger="kvpolicy"):
        part, _ = write_prompts.fn(home, plain, PROMPTS, **_asked(plain))
    note = "the model's chat template fails (only with tools)"
    assert f"test prompts are in the plain format, without chat turns: {note}" in caplog.text
    assert Catalog(home).artifact(part.artifact_id).metadata["formats"] == {"prompt": {"is_chat": False, "note": note}}


def test_a_row_says_how_a_setting_divides_a_sample(prompts, model):
    part = prompts("test")
    example = read_encoded(part, model)[0]
    agnostic, aware = (sample_row(example, name, part, model) for name in ("query_agnostic", "query_aware"))
    assert agnostic["context_tokens"] == len(example.context_ids)
    assert aware["context_tokens"] == len(example.context_ids) + len(example.question_ids)
    assert agnostic["answer_tokens"] == aware["answer_tokens"] == len(example.answer_ids)
    assert agnostic["prompt_digest"] == example.sample.digest()


def _judging(*, agent="default", methods=("kvp",), **changes):
    evaluate = EvaluateConfig(methods=methods, **changes)
    return PipelineConfig(
        preset="own", version="1", evaluate=evaluate, train=TrainConfig(agent=AgentConfig.named(agent))
    )


def test_budgets_above_a_context_are_refused(prompts, model):
    part = prompts("test")
    shortest = min(len(example.context_ids) for example in read_encoded(part, model))
    check_prompts.fn(model, [part], _judging(budgets=(20, shortest)))
    with pytest.raises(InputError, match=f"budget {shortest + 1} is above the context of sample ruler/"):
        check_prompts.fn(model, [part], _judging(budgets=(20, shortest + 1)))


def test_what_may_follow_a_prompt_needs_positions_too(prompts, model, tmp_path):
    part = prompts("test")
    example = read_encoded(part, model)[0]
    num_prompt = len(example.context_ids) + len(example.question_ids)
    room = load_model(model).spec.max_positions - num_prompt
    longer = dataclasses.replace(example.sample, max_new_tokens=room + 1)
    part = dataclasses.replace(part, path=str(tmp_path / "longer.parquet"))
    write_rows(Path(part.path), [dataclasses.asdict(longer)])
    with pytest.raises(InputError, match=f"sample ruler/.* takes {2048 + 1} tokens .* has 2048 positions"):
        check_prompts.fn(model, [part], _judging(budgets=(20,)))
    check_prompts.fn(model, [part], _judging(budgets=(20,), max_answer_tokens=room))
    check_prompts.fn(model, [part], _judging(budgets=(20,), num_generated=0))


@pytest.mark.parametrize("chunk_tokens", [None, 32])
@pytest.mark.parametrize(
    ("family", "num_tokens", "reason"),
    [
        ("mistral_window", 100, None),
        ("mistral_window", 128, "a sliding window of 128 tokens"),
        ("gemma3", 128, "a sliding window of 128 tokens"),
        ("phi3_longrope", 100, None),
        ("phi3_longrope", 128, "change after 128 tokens"),
        ("phi3_longrope", 129, None),
    ],
)
def test_lengths_that_the_model_computes_otherwise_are_refused_before_anything_is_collected(
    home, prompts, tmp_path, tiny_model_folder, family, num_tokens, reason, chunk_tokens
):
    reference = register_model.fn(home, str(tiny_model_folder(family)), "float32")
    part = dataclasses.replace(prompts("test"), path=str(tmp_path / "sample.parquet"))
    shared = read_samples(prompts("test"))[0]

    def write(context):
        short = {"question": " What?", "answer_prefix": " It is", "answer": " 48.", "max_new_tokens": 20}
        write_rows(Path(part.path), [dataclasses.asdict(dataclasses.replace(shared, context=context, **short))])
        (example,) = read_encoded(part, reference)
        return len(example.context_ids) + len(example.question_ids)

    assert write("x" * (1 + num_tokens - write("x"))) == num_tokens
    config = _judging(budgets=(20,), chunk_tokens=chunk_tokens, settings=("query_aware",))
    with does_not_raise() if reason is None else pytest.raises(InputError, match=f"sample ruler/.* but .*{reason}"):
        check_prompts.fn(reference, [part], config)


def test_contexts_beyond_the_table_of_the_agents_are_refused(prompts, model, monkeypatch):
    part = prompts("test")
    longest = max(len(example.context_ids) + len(example.question_ids) for example in read_encoded(part, model))
    paper, default = (_judging(budgets=(20,), agent=name) for name in ("paper", "default"))
    monkeypatch.setattr("kvpolicy.policies.agent.PAPER_TABLE_ROWS", longest)
    check_prompts.fn(model, [part], paper)
    monkeypatch.setattr("kvpolicy.policies.agent.PAPER_TABLE_ROWS", longest - 1)
    check_prompts.fn(model, [part], default)
    with pytest.raises(InputError, match=f"position {longest - 1} is past the learned table of {longest - 1} rows"):
        check_prompts.fn(model, [part], paper)


def test_what_policies_learn_from_needs_positions_too(prompts, model, monkeypatch):
    train, test = prompts("train"), prompts("test")
    config = _judging(budgets=(20,), agent="paper")
    contexts = {part.split: [len(one.context_ids) for one in read_encoded(part, model)] for part in (train, test)}
    longest = max(contexts["train"])
    monkeypatch.setattr("kvpolicy.policies.agent.PAPER_TABLE_ROWS", longest - 1)
    with pytest.raises(InputError, match=f"position {longest - 1} is past the learned table"):
        check_prompts.fn(model, [train, test], config)


def test_soft_tokens_need_positions_behind_the_context(prompts, model):
    part = prompts("test")
    example = max(read_encoded(part, model), key=lambda one: len(one.context_ids + one.question_ids))
    room = load_model(model).spec.max_positions - len(example.context_ids + example.question_ids)
    for num_tokens, refused in ((room, does_not_raise()), (room + 1, pytest.raises(InputError, match="soft tokens"))):
        config = dataclasses.replace(
            _judging(budgets=(20,), methods=("judgeq",)), soft_tokens=SoftTokenConfig(num_tokens=num_tokens)
        )
        with refused:
            check_prompts.fn(model, [part], config)


def test_splits_that_share_a_text_are_refused(prompts, model):
    train, test = prompts("train"), prompts("test")
    check_prompts.fn(model, [train, test], _judging(budgets=(20,)))
    leaked = dataclasses.replace(train, path=test.path)
    with pytest.raises(InputError, match=r"train.*test|test.*train"):
        check_prompts.fn(model, [leaked, test], _judging(budgets=(20,)))
