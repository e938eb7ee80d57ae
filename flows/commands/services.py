"""The commands `kvp up`, `kvp down` and `kvp status`: the services of a home."""

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands.options import HomeOption, JsonOption
from flows.runtime.process import (
    configure_libraries,
    open_home,
    point_prefect_at,
    prepared_home,
    standard_output_kept_clean,
)
from flows.services.processes import SERVER, recorded
from storage.errors import StorageError
from storage.home import Home

if TYPE_CHECKING:
    from flows.services.lifecycle import Status

PortOption = Annotated[int | None, typer.Option(help="Of Prefect's server [default: a free one]", min=1, max=65535)]
MlflowPortOption = Annotated[
    int | None, typer.Option(help="Of MLflow's server [default: a free one]", min=1, max=65535)
]
RunsOption = Annotated[int, typer.Option("--runs", help="Flow runs of deployments at once, say one a GPU", min=1)]


def up(
    home: HomeOption = None,
    port: PortOption = None,
    mlflow_port: MlflowPortOption = None,
    runs: RunsOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Start Prefect's server, a worker and MLflow for this home, and register the deployments; what runs stays."""
    configure_libraries()
    opened = open_home(home)
    _refuse_another_server(opened)
    point_prefect_at(opened.path)
    with standard_output_kept_clean():
        from flows.services import lifecycle

        current = lifecycle.up(opened, port=port, mlflow_port=mlflow_port, runs_at_once=runs)
    _print(current, as_json=as_json)


def down(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """End what `kvp up` started for this home, and nothing else."""
    opened = _home_of_services(home)
    with standard_output_kept_clean():
        from flows.services import lifecycle

        ended, recovered = lifecycle.down(opened)
    if as_json:
        crashed = [dataclasses.asdict(run) for run in recovered]
        print(json.dumps({"home": str(opened.path), "ended": ended, "recovered": crashed}))
        return
    print(f"ended: {', '.join(ended)}" if ended else "nothing runs")
    for run in recovered:
        print(f"crashed with it: flow run {run.name} ({run.flow_run_id})")


def status(
    home: HomeOption = None,
    recover: Annotated[
        bool, typer.Option("--recover", help="Note flow runs whose process is dead as crashed, also without a server")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show which services run, deployments, flow runs, and those taken for running although their process is dead."""
    opened = _home_of_services(home)
    with standard_output_kept_clean():
        from flows.services import lifecycle

        recovered = lifecycle.recover_orphans(opened) if recover else []
        current = lifecycle.status(opened, recovered=recovered)
    _print(current, as_json=as_json)


def _print(current: "Status", *, as_json: bool) -> None:
    from flows.display.printing import print_records

    if as_json:
        print(json.dumps(dataclasses.asdict(current)))
        return
    columns = ["service", "state", "url", "pid", "since", "log"]
    print_records(
        [
            {
                "service": service.name,
                "state": "started" if service.started else service.state,
                **{name: getattr(service, name) for name in columns[2:]},
            }
            for service in current.services
        ],
        as_json=False,
    )
    if current.api_url:
        print(f"\nPrefect's own commands:  export PREFECT_API_URL={current.api_url}")
        print(f"deployments:             {', '.join(current.deployments) or 'none'}")
    for kind, runs in (
        ("runs", current.flow_runs),
        ("orphan, its process is dead (--recover notes that)", current.orphans),
        ("now noted as crashed", current.recovered),
    ):
        for run in runs:
            print(f"{kind}: flow run {run.name} ({run.flow_run_id}), {run.state}, since {run.started_at or 'never'}")
            if line := current.progress.get(run.flow_run_id):
                print(f"      {line}")


def _refuse_another_server(home: Home) -> None:
    named, known = os.environ.get("PREFECT_API_URL"), recorded(home, SERVER)
    if named and (known is None or named.rstrip("/") != f"{known.url}/api"):
        raise StorageError(
            f"PREFECT_API_URL names the server {named}, which all commands would use in place of this home's: unset it"
        )
    os.environ.pop("PREFECT_API_URL", None)


def _home_of_services(home: str | None) -> Home:
    """Open an existing home and ignore a server that `PREFECT_API_URL` names for other commands."""
    os.environ.pop("PREFECT_API_URL", None)
    return prepared_home(home)
