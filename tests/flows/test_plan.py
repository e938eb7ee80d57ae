"""One plan a run: the model is registered once, each prompt set written once, each prompt tokenised once a stage."""

from collections import Counter

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.context import TaskRunContext

import tasks.inputs.samples
from flows.pipeline import evaluate, retrain
from flows.runtime.run_options import Choices
from kvpolicy.errors import InputError
from storage.catalog.catalog import Catalog
from storage.home import Home

SETTINGS = ["evaluate.num_analysed=1", "soft_tokens.num_steps=2", "soft_tokens.num_contexts=2"]


@pytest.fixture
def options(small_model, prefect_here, tmp_path):
    """Of a small run in a new home."""
    choices = Choices(tasks=["niah_single_1"], methods=["kvp", "judgeq", "knorm"], settings=SETTINGS)
    return {"preset": "smoke", "model": str(small_model), "home": str(tmp_path / "home"), "choices": choices}


def test_a_run_plans_once(options, monkeypatch):
    encode, encoded = tasks.inputs.samples.encode, Counter()

    def counted(sample, tokenizer):
        encoded[TaskRunContext.get().task.name, sample.sample_id] += 1
        return encode(sample, tokenizer)

    monkeypatch.setattr(tasks.inputs.samples, "encode", counted)
    retrain(**options)
    assert {task for task, _ in encoded} == {
        *("check-prompts", "collect-fragment", "train-soft-tokens", "evaluate-shard", "analyse-shard")
    }
    assert set(encoded.values()) == {1}

    home = Home.open(options["home"])
    (flow_run_id,) = {row["prefect_flow_run_id"] for row in Catalog(home).rows("runs")}
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])), limit=200)
    started = Counter(client_run.name.rpartition("-")[0] for client_run in runs)
    assert (started["register-model"], started["write-prompts"], started["check-prompts"]) == (1, 3, 1)


def test_a_flow_alone_names_the_command_that_makes_what_it_reads(options):
    with pytest.raises(InputError, match="run `kvp collect --preset smoke` with the same options first"):
        evaluate(**options)
