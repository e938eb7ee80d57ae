"""The configuration of a pipeline: presets that load and fit, and problems that are all named in one line."""

import dataclasses
import tomllib
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import kvpolicy
from kvpolicy.benchmarks.prompt_set import generate_samples
from kvpolicy.errors import InputError
from kvpolicy.policies.agent import PAPER_TABLE_ROWS, AgentConfig
from kvpolicy.presets.pipeline_config import PipelineConfig, load_preset, parse_config, preset_names, read_setting
from kvpolicy.text.encoded_sample import encode
from kvpolicy.text.protocol import cut_sample


@pytest.fixture(scope="module")
def tokenizer(embedded_model_folder):
    return AutoTokenizer.from_pretrained(embedded_model_folder, local_files_only=True)


@pytest.mark.parametrize("name", preset_names())
def test_presets_load(name):
    config = load_preset(name)
    assert config.preset == name
    assert config.version
    assert config.dtype == "bfloat16"
    assert len(config.evaluate.budgets) >= 6
    assert "query_agnostic" in config.evaluate.settings
    assert list(config.evaluate.budgets) == sorted(config.evaluate.budgets)


@pytest.mark.parametrize("name", preset_names())
def test_budgets_of_presets_fit_in_the_contexts_of_every_task(name, tokenizer):
    config = load_preset(name)
    made = generate_samples(config.prompts, split="test", num_samples_per_task=1, seed=0, tokenizer=tokenizer)
    samples = made.samples
    assert [sample.task for sample in samples] == list(config.prompts.tasks)
    for sample in samples:
        cut = cut_sample(encode(sample, tokenizer), "query_agnostic")
        config.evaluate.check_context(cut.num_context, sample.sample_id)


def test_the_paper_preset_is_the_published_schedule():
    config = load_preset("paper")
    train = config.train
    assert (train.objective, train.num_steps, train.batch_sequences) == ("rloo", 4000, 128)
    assert (train.weight_decay, train.max_gradient_norm, train.ema_decay) == (1e-3, 5.0, 0.99)
    assert {train.ema_decay_at(step) for step in (1, 4000)} == {0.99}
    assert train.learning_rate_at(1) == pytest.approx(5e-5 * (0.01 + 0.99 / 100))
    assert train.learning_rate_at(100) == pytest.approx(5e-5)
    assert train.learning_rate_at(2050) == pytest.approx((5e-5 + 1e-6) / 2)
    assert train.learning_rate_at(4000) == pytest.approx(1e-6)
    assert train.agent == AgentConfig.named("paper")
    assert config.prompts.length_tokens == 4096 <= PAPER_TABLE_ROWS
    assert config.collect.num_train_samples * len(config.prompts.tasks) == 6000
    assert config.evaluate.num_random_seeds >= 3


def test_presets_say_what_their_files_say():
    demo = load_preset("demo")
    assert demo.prompts.tasks == ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
    assert demo.train.agent == AgentConfig()
    assert isinstance(demo.evaluate.budgets, tuple)
    assert hash(demo) == hash(load_preset("demo"))


@pytest.mark.parametrize("name", preset_names())
def test_presets_name_their_methods(name):
    """Otherwise a new method would take part in what was asked for before there was one, and make that stale."""
    (file,) = (file for file in (Path(kvpolicy.__file__).parent / "presets").iterdir() if file.stem == name)
    assert tomllib.loads(file.read_text())["evaluate"]["methods"]


def test_an_unknown_preset_is_refused_with_those_there_are(fails_in_one_line):
    message = fails_in_one_line(load_preset, "huge")
    assert all(name in message for name in ("huge", *preset_names()))


def test_a_file_of_nothing_but_its_version_is_the_defaults():
    assert parse_config('version = "3"', name="own") == PipelineConfig(preset="own", version="3")


def test_all_problems_are_named_in_one_line(fails_in_one_line):
    message = fails_in_one_line(
        parse_config,
        """
        colour = "red"
        dtype = "int3"
        [prompts]
        tasks = ["vt", "juggling"]
        [collect]
        speed = 3
        num_train_samples = 0
        [train]
        num_steps = 0
        objective = "guess"
        agent = { depth = 3, width = 0 }
        [evaluate]
        budgets = [1, 64]
        num_samples = 0
        """,
        name="own",
    )
    expected = (
        "configuration own",
        "colour is unknown",
        "version is missing",
        "int3",
        "juggling",
        "collect.speed is unknown",
        "num_train_samples is 0",
        "num_steps is 0",
        "'guess'",
        "train.agent.depth is unknown",
        "width is 0",
        "budget 1 is below",
        "num_samples is 0",
    )
    assert [part for part in expected if part not in message] == []


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("train = 3", "train"),
        ('train = "exact"', "train"),
        ("evaluate = [1, 2]", "evaluate"),
        ("[train]\nagent = 3", "train.agent"),
        ('[train]\nnum_steps = "many"', "train.num_steps"),
        ("[train]\nnum_steps = 1.5", "train.num_steps"),
        ("[train]\nnum_steps = true", "train.num_steps"),
        ('[train]\nlearning_rate = "low"', "train.learning_rate"),
        ("[collect]\nsetting = 3", "collect.setting"),
        ('[evaluate]\nbudgets = [64, "most"]', "evaluate.budgets"),
        ("[evaluate]\nbudgets = 64", "evaluate.budgets"),
        ('[evaluate]\nmax_answer_tokens = "few"', "evaluate.max_answer_tokens"),
        ('[prompts]\ntasks = "vt"', "prompts.tasks"),
        ("[prompts]\ndata = 3", "prompts.data"),
    ],
)
def test_a_value_of_another_type_is_named_with_its_place(fails_in_one_line, text, place):
    assert place in fails_in_one_line(parse_config, f'version = "1"\n{text}', name="own")


def test_an_agent_has_a_name_or_a_shape(fails_in_one_line):
    def agent(text):
        return parse_config(f'version = "1"\n[train]\nagent = {text}', name="own").train.agent

    assert agent('"small"') == AgentConfig.named("small") == agent("{ width = 16 }")
    message = fails_in_one_line(agent, '"huge"')
    assert "train.agent" in message and "'huge'" in message and "default, small, paper" in message


def test_a_whole_number_is_a_number():
    assert parse_config('version = "1"\n[train]\nweight_decay = 0', name="own").train.weight_decay == 0


def test_a_file_that_is_no_toml_is_refused(fails_in_one_line):
    assert "own" in fails_in_one_line(parse_config, "version = = 1\n[[", name="own")


def test_changes_leave_the_rest_as_it_is():
    smoke = load_preset("smoke")
    changed = smoke.with_changes({"evaluate": {"budgets": (24, 48)}, "train": {"objective": "rloo"}, "prompts": {}})
    assert changed.evaluate.budgets == (24, 48)
    assert changed.train.objective == "rloo"
    assert changed == dataclasses.replace(
        smoke,
        evaluate=dataclasses.replace(smoke.evaluate, budgets=(24, 48)),
        train=dataclasses.replace(smoke.train, objective="rloo"),
    )
    assert smoke == load_preset("smoke") == smoke.with_changes({})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"judge": {"budgets": (64,)}}, ("judge", "evaluate")),
        (
            {"evaluate": {"budgets": (64,), "pace": 1, "colour": 2}},
            ("evaluate.colour is unknown", "evaluate.pace is unknown"),
        ),
        ({"evaluate": {"budgets": (3,)}}, ("budget 3",)),
        ({"prompts": {"tasks": ("qa_1",)}}, ("qa_1", "squad")),
        ({"train": {"objective": "guess"}}, ("'guess'", "exact, rloo")),
        ({"evaluate": {"chunk_tokens": 0, "methods": ("kvp",)}}, ("chunk_tokens is 0",)),
        ({"evaluate": {"chunk_tokens": 64, "methods": ("kvp", "h2o")}}, ("h2o cannot be evaluated in chunks",)),
        (
            {"evaluate": {"chunk_tokens": 64, "methods": ("kvp",), "num_analysed": 1}},
            ("num_analysed is 1, expected 0",),
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_changes_that_are_wrong_are_refused(fails_in_one_line, changes, expected):
    message = fails_in_one_line(load_preset("smoke").with_changes, changes)
    assert all(part in message for part in expected)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(InputError, match=r"'int3'.*bfloat16"):
        PipelineConfig(preset="own", version="1", dtype="int3")


def test_single_settings_are_as_toml_has_them_or_plain_text():
    entries = [
        "evaluate.num_samples=4",
        "evaluate.budgets=[24, 48]",
        "train.agent.width=32",
        "collect.setting=query_aware",
    ]
    smoke = load_preset("smoke")
    changed = smoke.with_changes(*map(read_setting, entries))
    assert changed == dataclasses.replace(
        smoke,
        evaluate=dataclasses.replace(smoke.evaluate, num_samples=4, budgets=(24, 48)),
        train=dataclasses.replace(smoke.train, agent=dataclasses.replace(smoke.train.agent, width=32)),
        collect=dataclasses.replace(smoke.collect, setting="query_aware"),
    )
    assert smoke.with_changes(read_setting("train.agent=paper")).train.agent == AgentConfig.named("paper")
    twice = map(read_setting, ["train.num_steps=3", "train.num_steps=5"])
    assert smoke.with_changes(*twice).train.num_steps == 5


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("evaluate.num_samples", "section.field=value"),
        ("num_samples=4", "section.field=value"),
        ("evaluate.=4", "section.field=value"),
        ("evaluate.num_samples=", "expected a whole number"),
        ("evaluate.num_samples=9223372036854775808", "expected a whole number of at most 64 bits"),
        ("train.learning_rate=nan", "train.learning_rate is nan, expected a finite number"),
        ("train.learning_rate=-inf", "expected a finite number"),
        ("evaluate.num_samples=many", "evaluate.num_samples is 'many'"),
        ("evaluate.num_samples=0", "num_samples is 0"),
        ("evaluate.pace=1", "evaluate.pace is unknown"),
        ("judge.pace=1", "judge is unknown"),
        ("version.major=2", "version is"),
    ],
)
def test_single_settings_that_are_wrong_are_refused(fails_in_one_line, entry, expected):
    assert expected in fails_in_one_line(lambda: load_preset("smoke").with_changes(read_setting(entry)))
