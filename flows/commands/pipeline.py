"""The commands that run flows: `run`, which runs all of them, `collect`, `train`, `evaluate` and `ablate`."""

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer

from flows.commands.options import HomeOption, JsonOption, is_whole_number
from flows.process import configure_libraries, open_home, point_prefect_at, standard_output_kept_clean
from flows.services.server import own_server
from storage.home import Home

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

Report = Callable[[Home, Any, bool], None]
"""Prints what a flow returned: of a home, as JSON or not."""


def add_pipeline_commands(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for name, flow, report, help_text in (
        ("run", "retrain", _report_run, "Run the whole pipeline: collect, train, evaluate."),
        ("collect", "collect", _report_stage, "Run a model over prompts and store the traces."),
        ("train", "train", _report_stage, "Train one policy per KV head on collected traces."),
        ("evaluate", "evaluate", _report_stage, "Judge trained policies and every heuristic on held-out prompts."),
        (
            "ablate",
            "ablate",
            _report_ablation,
            "Train with several objectives and seeds on collected traces, and compare what they reach.",
        ),
    ):
        app.command(name=name, help=help_text)(_pipeline_command(flow, report))


def _pipeline_command(flow: str, report: Report) -> Callable[..., None]:
    """A command that runs a flow and reports what it returned; all of them take the same options."""

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

    return command


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


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str | None) -> list[int] | None:
    parts = _listed(text)
    if parts is not None and not all(map(is_whole_number, parts)):
        raise typer.BadParameter(f"--budgets is {text!r}, expected whole numbers of tokens such as 64,128,256")
    return None if parts is None else [int(part) for part in parts]
