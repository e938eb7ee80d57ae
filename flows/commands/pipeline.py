"""The commands that run flows: `run`, which runs all of them, `collect`, `train`, `evaluate` and `ablate`."""

import inspect
import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from flows.commands.options import HomeOption, JsonOption, is_whole_number
from flows.runtime.process import configure_libraries, open_home, point_prefect_at, standard_output_kept_clean
from flows.services.prefect_server import own_server
from storage.home import Home

Report = Callable[[Home, Any, bool], None]
"""Prints what a flow returned: of a home, as JSON or not."""
# Choices that have an option for each entry, as entries may hold commas: its name and what it takes.
_REPEATED = {"data": ("--data", "NAME=PATH"), "settings": ("--set", "FIELD=VALUE")}
_OF_RUNNER = {"runner": "name", "runner_address": "address", "runner_workers": "num_workers"}


def add_pipeline_commands(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for name, flow, report, help_text in (
        ("run", "retrain", _report_run, "Run the whole pipeline: collect, train, evaluate."),
        ("collect", "collect", _report_stage, "Run a model over prompts and store the traces."),
        ("train", "train", _report_stage, "Train one policy per KV head on collected traces."),
        ("evaluate", "evaluate", _report_stage, "Evaluate trained policies and every heuristic on held-out prompts."),
        ("ablate", "ablate", _report_ablation, "Train with several objectives and seeds, and compare held-out costs."),
    ):
        app.command(name=name, help=help_text, cls=_LateCommand)(_maker(flow, report))


class _LateCommand(TyperCommand):
    """A command that is made when it is used, by its callback: the configuration that declares its options is heavy."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Make the command, and the context of it."""
        program = typer.Typer(add_completion=False, rich_markup_mode=None)
        program.command(name=self.name, help=self.help)(self.callback())
        return typer.main.get_command(program).make_context(info_name, args, parent, **extra)


def _maker(flow: str, report: Report) -> Callable[[], Callable[..., None]]:
    return lambda: _pipeline_command(flow, report)


def _pipeline_command(flow: str, report: Report) -> Callable[..., None]:
    """A command that runs a flow and reports what it returned; all of them take the same options."""
    configure_libraries()
    from flows.runners.clusters import check_runner
    from flows.runtime.run_options import Choices, Runner
    from kvpolicy.presets.pipeline_config import preset_names

    kinds = {name: get_args(kind)[0] for name, kind in get_type_hints(Choices, include_extras=True).items()}

    def command(
        preset: Annotated[str, typer.Option(help=f"Preset of the configuration: {', '.join(preset_names())}")] = "demo",
        model: Annotated[
            str, typer.Option(help="embedded, a folder, a GGUF file, a hub id or models:/NAME/1", metavar="REF")
        ] = "embedded",
        home: HomeOption = None,
        seed: Annotated[int, typer.Option(help="Seed of prompts, training and draws", min=0, max=2**63 - 1)] = 0,
        traces: Annotated[
            str | None,
            typer.Option(help="Where a new home keeps its traces: a folder or s3://bucket/prefix", metavar="URL"),
        ] = None,
        as_json: JsonOption = False,
        **chosen: Any,
    ) -> None:
        runner = Runner(**{field: chosen.pop(option) for option, field in _OF_RUNNER.items()})
        choices = Choices(**{name: _entries(name, value, kinds[name]) for name, value in chosen.items()})
        # Checked before anything is made.
        choices.configure(preset)
        check_runner(runner)
        opened = open_home(home, traces=traces)
        point_prefect_at(opened.path)
        with standard_output_kept_clean(), own_server(opened) as wait_for_server:
            from flows import ablation, pipeline

            run_flow = getattr(ablation if flow == "ablate" else pipeline, flow)
            wait_for_server()
            result = run_flow(
                preset=preset, model=model, home=str(opened.path), seed=seed, choices=choices, runner=runner
            )
        report(opened, result, as_json)

    *common, as_json, _ = inspect.signature(command).parameters.values()
    parameters = [*common, *_derived(Choices, Runner), as_json]
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _derived(choices: type, runner: type) -> Iterator[inspect.Parameter]:
    """The options of choices and runner, as their fields are declared."""
    from kvpolicy.config.settings import bare_type, field_types, meanings

    for name, annotated in get_type_hints(choices, include_extras=True).items():
        kind, field = get_args(annotated)
        one_by_one = name in _REPEATED
        form = "" if bare_type(kind) is str else "; repeatable" if one_by_one else "; comma-separated"
        yield _option(name, list[str] | None if one_by_one else str | None, None, field.description, form)
    for name, of_runner in _OF_RUNNER.items():
        kind = int | None if bare_type(field_types(runner)[of_runner]) is int else str | None
        yield _option(name, kind, getattr(runner, of_runner), meanings(runner)[of_runner])


def _option(name: str, kind: Any, default: Any, meaning: str, form: str = "") -> inspect.Parameter:
    flag, metavar = _REPEATED.get(name, (f"--{name.replace('_', '-')}", None))
    option = typer.Option(flag, help=meaning.replace("`", "").rstrip(".") + form, metavar=metavar)
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, either, default=default, annotation=Annotated[kind, option])


def _entries(name: str, given: Any, kind: Any) -> Any:
    """A choice of its option: entries between commas, where it is a list."""
    if not isinstance(given, str) or str in get_args(kind):
        return given or None
    entries = [part.strip() for part in given.split(",") if part.strip()]
    if list[str] in get_args(kind):
        return entries
    if not all(map(is_whole_number, entries)):
        raise typer.BadParameter(f"--{name} is {given!r}, expected whole numbers of tokens such as 64,128,256")
    return [int(entry) for entry in entries]


def _report_run(home: Home, stages: Any, as_json: bool) -> None:
    from flows.display.summary import print_summary, summarise

    summary = summarise(home, stages)
    if as_json:
        print(json.dumps(summary, allow_nan=False))
    else:
        print_summary(summary)


def _report_stage(home: Home, stage: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"home": str(home.path), **vars(stage)}))
    else:
        from flows.display.summary import print_stage

        print_stage(home, stage)


def _report_ablation(home: Home, rows: Any, as_json: bool) -> None:
    from flows.display.printing import print_records

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
