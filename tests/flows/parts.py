"""Parts for tests of runners, and a program that runs them on a pool of one process and prints what came of them."""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from prefect import flow

from flows.runners.engagement import engaged
from flows.runners.fan_out import run_parts
from flows.runtime.run_options import Runner
from kvpolicy.errors import InputError
from tasks.framework.stage import code_of, stage_task
from tasks.framework.worker import keep_to_flow


@stage_task("echo")
def echo(value: int) -> int:
    """Return what was given."""
    return value


@stage_task("refuse")
def refuse(value: int) -> None:
    """Refuse what was given."""
    raise InputError(f"value is {value}, expected another")


@stage_task("die")
def die(times: int, folder: Path) -> int:
    """End the worker so many times, counted by files in a folder; then return how often that was."""
    died = len(list(folder.iterdir()))
    if died < times:
        (folder / str(died)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return died


@stage_task("leave")
def leave() -> None:
    """Exit, as Prefect does in a worker that has lost its server."""
    try:
        raise httpx.ConnectError("nothing listens")
    except httpx.TransportError as error:
        try:
            raise RuntimeError("no server is reached") from error
        except RuntimeError:
            sys.exit(1)


@stage_task("wait")
def wait(sign: Path) -> None:
    """Leave a sign, and wait for long."""
    sign.touch()
    time.sleep(600)


@stage_task("look-around")
def look_around() -> tuple[int, int, str]:
    """Return the process, its number of threads, and what it tells libraries to use."""
    import torch

    keep_to_flow(code_of(__name__))
    return os.getpid(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


@flow(name="on-one-pool")
def on_one_pool(folder: Path) -> dict[str, Any]:
    """Run all of these parts on one pool."""
    quick = [partial(echo, value) for value in range(4)]
    told: dict[str, Any] = {"flow": os.getpid()}
    for name in ("once", "often"):
        (folder / name).mkdir()
    with engaged(Runner(name="processes", num_workers=1)):
        (told["worker"],) = run_parts("look around", [partial(look_around)])
        told["died once"] = run_parts("die", [*quick, partial(die, 1, folder / "once")])
        for name, parts in {
            "refused": [partial(echo, 1), partial(refuse, 7), partial(refuse, 8)],
            "left": [partial(leave), partial(echo, 1)],
            "died often": [partial(die, 9, folder / "often")],
        }.items():
            try:
                run_parts(name, parts)
            except (InputError, httpx.TransportError) as error:
                told[name] = str(error)
    return told


def main() -> None:
    """Run them in the folder that is the first argument."""
    sys.stdout.write(json.dumps(on_one_pool(Path(sys.argv[1]))))


@flow(name="many-parts")
def many_parts(runner: Runner, count: int) -> dict[str, Any]:
    """Run near-empty parts, after some that start the workers."""
    with engaged(runner):
        started = time.monotonic()
        run_parts("start", [partial(look_around)] * 2)
        ready = time.monotonic()
        assert run_parts("many", [partial(echo, value) for value in range(count)]) == list(range(count))
        return {"start_s": ready - started, "seconds": time.monotonic() - ready, "parts": count}


def time_parts() -> None:
    """Run 90 of them on the runner that is the first argument."""
    name: Any = sys.argv[1]
    runner = Runner(name=name) if name == "local" else Runner(name=name, num_workers=2)
    sys.stdout.write(json.dumps(many_parts(runner, 90)))


@flow(name="interrupted")
def wait_for_long(folder: Path) -> None:
    """Let one worker of two wait while the other one has nothing to do."""
    with engaged(Runner(name="processes", num_workers=2)):
        run_parts("start", [partial(look_around)] * 2)
        run_parts("wait", [partial(wait, folder / "sign")])


def be_interrupted() -> None:
    """Run that in the folder that is the first argument, until someone presses Ctrl-C."""
    try:
        wait_for_long(Path(sys.argv[1]))
    except KeyboardInterrupt:
        sys.stdout.write("interrupted")
