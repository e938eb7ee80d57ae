"""What a part costs beside its work: 90 near-empty parts on each runner, after its workers have started.

Printed by `make bench`. At most 0.3 s a part is wanted.
"""

import json
from pathlib import Path

import pytest

from tests.flows.processes import environment, run_command

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(900)]

LIMIT_S = 0.3
PROGRAM = """
from flows.runtime.process import configure_libraries, open_home, point_prefect_at
from flows.services.prefect_server import own_server

configure_libraries()
home = open_home(None)
point_prefect_at(home.path)
with own_server(home) as wait_for_server:
    from tests.flows.parts import time_parts  # Prefect is not to be imported before its server is known

    wait_for_server()
    time_parts()
"""


@pytest.mark.parametrize("runner", ["local", "processes", "ray", "dask"])
def test_overhead_of_a_part(runner: str, tmp_path: Path) -> None:
    env = environment(KVP_HOME=str(tmp_path))
    done = run_command(["python", "-c", PROGRAM, runner], env=env, timeout_s=600)
    assert done.code == 0, done.stderr
    told = json.loads(done.stdout)
    print(
        f"\n{runner}: {told['seconds'] / told['parts']:.3f} s a part of {told['parts']} (limit {LIMIT_S}); "
        f"the first two, with start-up of two workers, {told['start_s']:.1f} s"
    )
