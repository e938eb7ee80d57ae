"""The `kvp` command.

Results go to standard output, everything else to standard error. A wrong input is one line and a non-zero exit. Heavy
libraries are imported by the commands that need them, after the process is prepared.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import typer

from flows.process import configure_libraries, home_path, point_prefect_at
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

HomeOption = Annotated[
    str | None, typer.Option("--home", help="Folder of all state [default: KVP_HOME or ./.kvp]", metavar="DIR")
]
PresetOption = Annotated[str, typer.Option(help="smoke, demo or paper")]
ModelOption = Annotated[str, typer.Option(help="embedded, a model folder, a GGUF file or a hub id", metavar="REF")]
SeedOption = Annotated[int, typer.Option(help="Seed of prompts, training and draws")]
TasksOption = Annotated[str | None, typer.Option(help="Comma-separated tasks of the benchmark")]
MethodsOption = Annotated[str | None, typer.Option(help="Comma-separated methods to judge")]
BudgetsOption = Annotated[str | None, typer.Option(help="Comma-separated budgets in tokens")]
EstimatorOption = Annotated[str | None, typer.Option(help="exact or rloo")]
EssaysOption = Annotated[list[str] | None, typer.Option(help="Text file for the tasks that need prose; repeatable")]
SquadOption = Annotated[str | None, typer.Option(help="SQuAD v2.0 file, for qa_1")]
HotpotOption = Annotated[str | None, typer.Option(help="HotpotQA dev distractor file, for qa_2")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else")]


class Format(StrEnum):
    """How rows are printed."""

    table = "table"
    json = "json"
    csv = "csv"


@app.command()
def run(
    preset: PresetOption = "demo",
    model: ModelOption = "embedded",
    home: HomeOption = None,
    seed: SeedOption = 0,
    tasks: TasksOption = None,
    methods: MethodsOption = None,
    budgets: BudgetsOption = None,
    estimator: EstimatorOption = None,
    essays: EssaysOption = None,
    squad: SquadOption = None,
    hotpotqa: HotpotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the whole pipeline: collect, train, evaluate."""
    choices = _choices(tasks, methods, budgets, estimator, essays, squad, hotpotqa)
    stages = _run_flow("retrain", preset=preset, model=model, home=home, seed=seed, choices=choices)
    from flows.summary import print_summary, summarise

    summary = summarise(Home.open(home_path(home)), stages)
    if as_json:
        print(json.dumps(summary, allow_nan=False))
    else:
        print_summary(summary)


def _stage_command(name: str, help_text: str) -> None:
    """Add the command that runs one stage; all three take the same options."""

    def command(
        preset: PresetOption = "demo",
        model: ModelOption = "embedded",
        home: HomeOption = None,
        seed: SeedOption = 0,
        tasks: TasksOption = None,
        methods: MethodsOption = None,
        budgets: BudgetsOption = None,
        estimator: EstimatorOption = None,
        essays: EssaysOption = None,
        squad: SquadOption = None,
        hotpotqa: HotpotOption = None,
        as_json: JsonOption = False,
    ) -> None:
        choices = _choices(tasks, methods, budgets, estimator, essays, squad, hotpotqa)
        report = _run_flow(name, preset=preset, model=model, home=home, seed=seed, choices=choices)
        if as_json:
            print(json.dumps({"stage": name, **vars(report)}))
        else:
            what = "was there already" if report.skipped else "made"
            print(f"{name}: {report.artifact_id} {what} ({report.seconds:.1f} s)")

    app.command(name=name, help=help_text)(command)


_stage_command("collect", "Run a model over prompts and store the traces.")
_stage_command("train", "Train one policy per KV head on collected traces.")
_stage_command("evaluate", "Judge trained policies and every heuristic on held-out prompts.")


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help="One SELECT over the catalog's tables")],
    home: HomeOption = None,
    output: Annotated[Format, typer.Option("--format", help="How to print the rows")] = Format.table,
) -> None:
    """Ask the catalog in SQL."""
    from flows.printing import print_rows
    from storage.catalog import Catalog

    print_rows(Catalog(Home.open(home_path(home), create=False)).sql(query), output.value)


@app.command()
def lineage(
    any_id: Annotated[
        str, typer.Argument(metavar="ID", help="An artifact, a run, an MLflow run, or 6+ first characters")
    ],
    home: HomeOption = None,
    up: Annotated[bool, typer.Option("--up", help="What it came from (the default)")] = False,
    down: Annotated[bool, typer.Option("--down", help="What came from it")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what something came from, or what came from it."""
    from storage.catalog import Catalog
    from storage.graph import render_tree

    if up and down:
        raise typer.BadParameter("choose one of --up and --down")
    graph = Catalog(Home.open(home_path(home), create=False)).lineage(any_id, "down" if down else "up")
    print(json.dumps(graph.to_json(), default=str) if as_json else "\n".join(render_tree(graph)))


@app.command()
def models(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List the models that this home knows."""
    from flows.printing import print_rows
    from storage.catalog import Catalog

    columns = "model_id, name, source, revision, architecture, num_layers, num_kv_heads, head_dim, max_positions"
    rows = Catalog(Home.open(home_path(home), create=False)).sql(f"SELECT {columns} FROM models ORDER BY created_at")
    print_rows(rows, "json" if as_json else "table")


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
            "needs": info.needs_text or "",
            "max_new_tokens": info.max_new_tokens,
            "description": info.description,
        }
        for benchmark in benchmark_names()
        for info in tasks_of(benchmark)
    ]
    print_records(records, as_json=as_json)


def _choices(
    tasks: str | None,
    methods: str | None,
    budgets: str | None,
    estimator: str | None,
    essays: list[str] | None,
    squad: str | None,
    hotpotqa: str | None,
) -> dict[str, Any]:
    def listed(text: str | None) -> list[str] | None:
        return None if text is None else [part.strip() for part in text.split(",") if part.strip()]

    numbers = listed(budgets)
    if numbers is not None and not all(number.isdigit() for number in numbers):
        raise typer.BadParameter(f"--budgets is {budgets!r}, expected whole numbers of tokens such as 64,128,256")
    return {
        "tasks": listed(tasks),
        "methods": listed(methods),
        "budgets": None if numbers is None else [int(number) for number in numbers],
        "estimator": estimator,
        "essays": essays or None,
        "squad": squad,
        "hotpotqa": hotpotqa,
    }


def _run_flow(name: str, *, preset: str, model: str, home: str | None, seed: int, choices: dict[str, Any]) -> Any:
    """Check everything that can be checked at once, then run a flow with standard output kept clean."""
    configure_libraries()
    from flows.options import Choices

    made = Choices(**choices)
    made.configure(preset)
    opened = Home.open(home_path(home))
    point_prefect_at(opened.path)
    with _standard_output_kept_clean():
        from flows import pipeline

        flow = getattr(pipeline, name)
        return flow(preset=preset, model=model, home=str(opened.path), seed=seed, choices=made)


@contextmanager
def _standard_output_kept_clean() -> Iterator[None]:
    """Send what libraries and child processes print to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def main() -> None:
    """Entry point: run a command, and turn what is wrong into one line."""
    from kvpolicy.errors import InputError

    try:
        code = app(standalone_mode=False)
    except (InputError, StorageError) as error:
        _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted; run the same command again to go on", code=130)
    except BrokenPipeError:
        os._exit(0)  # the reader of our output has gone; there is nobody to tell
    except Exception as error:
        # typer carries a private copy of click, so its usage errors can only be told by what they offer.
        if not hasattr(error, "format_message"):
            raise
        _fail(f"{error.format_message().rstrip('.')}; see `kvp --help`", code=2)
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, *, code: int = 1) -> None:
    print(f"kvp: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
