"""The `kvp` command.

Results go to standard output, everything else to standard error. A wrong input is one line and a non-zero exit. Heavy
libraries are imported by the commands that need them, after the process is prepared.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from flows import (
    catalog_commands,
    dashboard_commands,
    generate_commands,
    lineage_commands,
    promotion_commands,
    repeat_commands,
    report_commands,
    service_commands,
    trace_commands,
    watch_commands,
)
from flows.command_options import HomeOption, JsonOption, is_whole_number
from flows.process import configure_libraries, open_home, point_prefect_at, standard_output_kept_clean
from flows.server import own_server
from storage.errors import StorageError
from storage.home import Home

app = typer.Typer(
    name="kvp",
    help="Learn, judge and ship eviction policies for the KV cache of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(trace_commands.app, name="traces")

_INTERRUPTED = 130

PresetOption = Annotated[str, typer.Option(help="smoke, demo, study or paper")]
ModelOption = Annotated[
    str, typer.Option(help="embedded, a folder, a GGUF file, a hub id or models:/NAME/1", metavar="REF")
]
SeedOption = Annotated[int, typer.Option(help="Seed of prompts, training and draws", min=0, max=2**63 - 1)]
TasksOption = Annotated[str | None, typer.Option(help="Comma-separated tasks, to train on and to judge on")]
MethodsOption = Annotated[str | None, typer.Option(help="Comma-separated methods to judge")]
BudgetsOption = Annotated[str | None, typer.Option(help="Comma-separated budgets in tokens")]
AgentOption = Annotated[str | None, typer.Option(help="Agents to train: default, small or paper")]
ObjectiveOption = Annotated[str | None, typer.Option(help="Training objective, such as exact, rloo or listwise")]
TracesOption = Annotated[
    str | None,
    typer.Option(help="Where a new home keeps its traces: a folder or s3://bucket/prefix", metavar="URL"),
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any other setting, such as evaluate.num_samples=4; repeatable", metavar="FIELD=VALUE"),
]
CompressionOption = Annotated[str | None, typer.Option(help="Of stored traces: none, zstd or shuffled_zstd")]
StoredDtypeOption = Annotated[str | None, typer.Option(help="Of stored keys and values: model or float8_e4m3fn")]
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        help="File for a task that needs one, local or hub:owner/name@rev/file; repeatable", metavar="NAME=PATH"
    ),
]
RunnerOption = Annotated[str, typer.Option(help="Where parts of the work run: local, processes, ray or dask")]
RunnerAddressOption = Annotated[
    str | None,
    typer.Option(help="Of a Ray or Dask cluster [default: RAY_ADDRESS or DASK_SCHEDULER_ADDRESS]", metavar="HOST:PORT"),
]
RunnerWorkersOption = Annotated[int | None, typer.Option(help="Parts that run at once on this machine", min=1)]
LanguageOption = Annotated[str | None, typer.Option(help="Code of the one language of dialogues, such as en")]


def _add_pipeline_command(name: str, help_text: str, *, flow: str, report: Callable[[Home, Any, bool], None]) -> None:
    """Add a command that runs a flow; all of them take the same options.

    Args:
        name: Of the command.
        help_text: Its help.
        flow: Name of the flow.
        report: Prints what the flow returned, given the home and whether JSON is wanted.
    """

    def command(
        preset: PresetOption = "demo",
        model: ModelOption = "embedded",
        home: HomeOption = None,
        seed: SeedOption = 0,
        tasks: TasksOption = None,
        methods: MethodsOption = None,
        budgets: BudgetsOption = None,
        agent: AgentOption = None,
        objective: ObjectiveOption = None,
        traces: TracesOption = None,
        compression: CompressionOption = None,
        stored_dtype: StoredDtypeOption = None,
        data: DataOption = None,
        language: LanguageOption = None,
        settings: SettingsOption = None,
        runner: RunnerOption = "local",
        runner_address: RunnerAddressOption = None,
        runner_workers: RunnerWorkersOption = None,
        as_json: JsonOption = False,
    ) -> None:
        configure_libraries()
        from flows.options import Choices, Runner
        from flows.runners.clusters import check_runner

        choices = Choices(
            tasks=_listed(tasks),
            methods=_listed(methods),
            budgets=_numbers(budgets),
            agent=agent,
            objective=objective,
            compression=compression,
            stored_dtype=stored_dtype,
            settings=settings or None,
            data=data or None,
            language=language,
        )
        chosen = Runner(name=runner, address=runner_address, num_workers=runner_workers)
        # Whatever is wrong with the choices is said before anything is made.
        choices.configure(preset)
        check_runner(chosen)
        opened = open_home(home, traces=traces)
        point_prefect_at(opened.path)
        with standard_output_kept_clean(), own_server(opened) as wait_for_server:
            from flows import ablation, pipeline

            run_flow = getattr(ablation if flow == "ablate" else pipeline, flow)
            wait_for_server()
            result = run_flow(
                preset=preset, model=model, home=str(opened.path), seed=seed, choices=choices, runner=chosen
            )
        report(opened, result, as_json)

    app.command(name=name, help=help_text)(command)


def _report_run(home: Home, stages: Any, as_json: bool) -> None:
    from flows.summary import print_summary, summarise

    summary = summarise(home, stages)
    if as_json:
        print(json.dumps(summary, allow_nan=False))
    else:
        print_summary(summary)


def _report_stage(home: Home, stage: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"home": str(home.path), **vars(stage)}))
    else:
        from flows.summary import print_stage

        print_stage(home, stage)


def _report_ablation(home: Home, rows: Any, as_json: bool) -> None:
    from flows.printing import print_records

    del home
    records = [
        {
            "objective": row.objective,
            **{f"heldout_cost{end}": value for end, value in _with_ends(row.cost)},
            **{f"difference{end}": value for end, value in _with_ends(row.difference)},
            "heads_better": row.heads_better,
            "num_seeds": row.num_seeds,
            "train_s": row.train_s,
        }
        for row in rows
    ]
    print_records(records, as_json=as_json)


def _with_ends(interval: Any) -> list[tuple[str, float]]:
    return [("", interval.mean), ("_low", interval.low), ("_high", interval.high)]


_add_pipeline_command("run", "Run the whole pipeline: collect, train, evaluate.", flow="retrain", report=_report_run)
_add_pipeline_command("collect", "Run a model over prompts and store the traces.", flow="collect", report=_report_stage)
_add_pipeline_command("train", "Train one policy per KV head on collected traces.", flow="train", report=_report_stage)
_add_pipeline_command(
    "evaluate",
    "Judge trained policies and every heuristic on held-out prompts.",
    flow="evaluate",
    report=_report_stage,
)

_add_pipeline_command(
    "ablate",
    "Train with several objectives and seeds on collected traces, and compare what they reach.",
    flow="ablate",
    report=_report_ablation,
)

app.command()(repeat_commands.stale)
app.command()(repeat_commands.rerun)
app.command()(generate_commands.generate)
app.command()(promotion_commands.promote)
app.command()(promotion_commands.rollback)
app.command()(lineage_commands.lineage)
app.command()(lineage_commands.diff)
app.command()(lineage_commands.openlineage)
app.command()(report_commands.report)
app.command()(dashboard_commands.dashboard)
app.command()(watch_commands.watch)
app.command()(service_commands.up)
app.command()(service_commands.down)
app.command()(service_commands.status)
app.command()(catalog_commands.compact)
app.command()(catalog_commands.sql)
app.command()(catalog_commands.models)


@app.command()
def methods(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List the eviction methods."""
    from flows.printing import print_records
    from kvpolicy.methods.registry import method_names, method_type

    del home  # every command takes it; this one needs none
    records = [
        {"method": name, "description": method_type(name).description, "reference": method_type(name).reference}
        for name in method_names()
    ]
    print_records(records, as_json=as_json)


@app.command()
def benchmarks(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List the benchmarks and their tasks."""
    from flows.printing import print_records
    from kvpolicy.benchmarks.registry import benchmark_names, tasks_of

    del home
    records = [
        {
            "benchmark": info.benchmark,
            "version": info.version,
            "task": info.task,
            "needs": info.source or "",
            "metrics": ", ".join(info.metrics),
            "max_new_tokens": info.max_new_tokens,
            "description": info.description,
        }
        for benchmark in benchmark_names()
        for info in tasks_of(benchmark)
    ]
    print_records(records, as_json=as_json)


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str | None) -> list[int] | None:
    parts = _listed(text)
    if parts is not None and not all(map(is_whole_number, parts)):
        raise typer.BadParameter(f"--budgets is {text!r}, expected whole numbers of tokens such as 64,128,256")
    return None if parts is None else [int(part) for part in parts]


def main() -> None:
    """Entry point: run a command, and turn what is wrong into one line."""
    from kvpolicy.errors import InputError, message_with_notes

    try:
        code = app(standalone_mode=False)
    except (InputError, StorageError) as error:
        _fail(message_with_notes(error))
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except BrokenPipeError:
        os._exit(0)  # the reader of our output has gone; there is nobody to tell
    except Exception as error:
        if _is_lost_connection(error):  # what else needs a network says so itself
            _fail("the Prefect server no longer answers: start it, then run the same command again to go on")
        # typer carries a private copy of click, so its usage errors can only be told by what they offer.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the whole help
            print(error.format_message(), file=sys.stderr)
            sys.exit(2)
        _fail(f"{error.format_message().rstrip('.')}; see `kvp --help`", code=2)
    if code == _INTERRUPTED:  # typer makes this of an interrupt, without a word
        _fail("interrupted; run the same command again to go on", code=_INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _is_lost_connection(error: BaseException | None) -> bool:
    httpx = sys.modules.get("httpx")  # Prefect's client has loaded it, or nobody has
    while httpx is not None and error is not None:
        # Prefect raises the second of the first, which does not travel with it from a worker.
        if isinstance(error, httpx.TransportError) or type(error).__name__ == "ConcurrencySlotAcquisitionError":
            return True
        error = error.__cause__
    return False


def _fail(message: str, *, code: int = 1) -> None:
    print(f"kvp: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
