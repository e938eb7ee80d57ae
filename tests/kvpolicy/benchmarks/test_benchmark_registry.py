import pytest

from kvpolicy.benchmarks.registry import BENCHMARKS, task_info, task_names, tasks_of
from kvpolicy.benchmarks.ruler import DEFAULT_TASKS, RULER_TASKS, VERSION
from kvpolicy.benchmarks.sources import SOURCES
from kvpolicy.errors import InputError
from kvpolicy.results.metrics import METRICS


def test_ruler_is_listed_with_what_each_task_needs() -> None:
    rows = tasks_of("ruler")
    assert [row.task for row in rows] == list(RULER_TASKS)
    assert tuple(row.task for row in rows if row.source is None) == DEFAULT_TASKS
    assert {row.source for row in rows} == {None, "essays", "squad", "hotpotqa"}
    assert all(row.version == VERSION and row.max_new_tokens > 0 for row in rows)


def test_every_task_is_found_by_its_name_alone() -> None:
    rows = [info for benchmark in BENCHMARKS.names for info in tasks_of(benchmark)]
    assert sorted(row.task for row in rows) == sorted(set(task_names()))
    for row in rows:
        assert task_info(row.task) == row
        assert row.description and row.version
        assert row.metrics and set(row.metrics) <= set(METRICS)
        assert row.is_generated == (row.max_new_tokens > 0)
        assert row.source is None or row.source in SOURCES


def test_the_metrics_of_tasks() -> None:
    assert {task: task_info(task).metrics for task in task_names() if task not in RULER_TASKS} == {
        "dialogue": ("perplexity",),
        "boolq": ("accuracy",),
        "arc_challenge": ("accuracy", "accuracy_normalised"),
        "mmlu": ("accuracy",),
        "hellaswag": ("accuracy", "accuracy_normalised"),
        "passage_retrieval_en": ("retrieval",),
        "passage_retrieval_zh": ("retrieval",),
        "gov_report": ("rouge_l",),
    }


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(InputError, match="benchmark 'rule' is unknown, expected one of ruler, oasst2"):
        tasks_of("rule")
    with pytest.raises(InputError, match=r"unknown task 'qa': choose one of niah_single_1, .*dialogue"):
        task_info("qa")
