"""The examples of deployments on clusters, as far as they can be tried without one."""

import copy
import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from processes import CHECKOUT

TEMPLATES = CHECKOUT / "docs" / "templates"
SLURM = TEMPLATES / "worker.slurm"
POOL = "kvpolicy-kubernetes"
GPU_FLOWS = {"retrain", "collect", "train", "evaluate"}
KUBERNETES = yaml.safe_load((TEMPLATES / "kubernetes.yaml").read_text())
JOB = json.loads((TEMPLATES / "kubernetes-job.json").read_text())
PROCESS = yaml.safe_load((CHECKOUT / "prefect.yaml").read_text())


@pytest.fixture
def ask(prefect_api):
    """Asks the server's API; a refusal is its status and reason."""

    def send(method: str, path: str, body: Any = None) -> tuple[int, Any]:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{prefect_api}/{path}", content, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = answer.read()
                return answer.status, json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return send


@pytest.mark.parametrize("described", [PROCESS, KUBERNETES], ids=["process", "kubernetes"])
def test_every_deployment_says_what_it_needs(described):
    for entry in described["deployments"]:
        path, _, flow = entry["entrypoint"].partition(":")
        assert re.search(rf"^def {flow}\(", (CHECKOUT / path).read_text(), flags=re.MULTILINE)
        assert "kvpolicy" in entry["tags"] and entry["description"]
        # What takes a device waits for it; a look at models must not.
        assert (entry["work_pool"].get("work_queue_name") == "gpu") == ("gpu" in entry["tags"]) == (flow in GPU_FLOWS)


def test_the_job_of_kubernetes_uses_all_of_its_variables_and_no_other():
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(JOB["job_configuration"])))
    assert used == set(JOB["variables"]["properties"])
    jsonschema.Draft202012Validator.check_schema(JOB["variables"])


def test_prefect_takes_the_pool_of_kubernetes_and_its_deployments(ask):
    for entry in KUBERNETES["deployments"]:
        jsonschema.validate(entry["work_pool"]["job_variables"], JOB["variables"])
    status, said = ask("POST", "work_pools/", {"name": POOL, "type": "kubernetes", "base_job_template": JOB})
    assert status == 201, said
    try:
        flow = ask("POST", "flows/", {"name": "retrain"})[1]["id"]

        def deploy(**job_variables: Any) -> tuple[int, Any]:
            body = {"name": "on-kubernetes", "flow_id": flow, "work_pool_name": POOL, "work_queue_name": "gpu"}
            return ask("POST", "deployments/", {**body, "job_variables": job_variables})

        chosen = KUBERNETES["deployments"][0]["work_pool"]["job_variables"]
        status, made = deploy(**chosen)
        assert status == 201, made
        assert made["job_variables"] == chosen
        status, said = deploy(**{**chosen, "gpus": "many"})
        assert (status, "gpus" in said) == (422, True), said
        broken = copy.deepcopy(JOB)
        del broken["variables"]["properties"]["image"]
        status, said = ask("POST", "work_pools/", {"name": "broken", "type": "kubernetes", "base_job_template": broken})
        assert status == 422, said
    finally:
        ask("DELETE", f"work_pools/{POOL}")


def _slurm(*args: str, env: dict[str, str], timeout_s: float = 20) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SLURM), *args], env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def test_the_script_for_slurm_is_one_and_says_what_it_needs(tmp_path: Path):
    assert subprocess.run(["bash", "-n", str(SLURM)], check=True, timeout=20).returncode == 0
    assert os.access(SLURM, os.X_OK)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", SLURM.read_text(), flags=re.MULTILINE))
    assert (asked["gres"], asked["ntasks"]) == ("gpu:1", "1")
    env = {"PATH": os.environ["PATH"]}
    for variables, missing in (({}, "PREFECT_API_URL"), ({"PREFECT_API_URL": "http://127.0.0.1:9/api"}, "KVP_HOME")):
        done = _slurm(env={**env, **variables})
        assert done.returncode != 0
        assert missing in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_script_for_slurm_starts_a_worker(ask, server_environment, tmp_path: Path):
    env = {**server_environment, "KVP_HOME": str(tmp_path), "KVP_CHECKOUT": str(CHECKOUT), "SLURM_JOB_ID": "4711"}
    ask("POST", "work_pools/", {"name": "kvpolicy", "type": "process"})
    done = _slurm("--run-once", env=env, timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert "Worker 'slurm-4711' started!" in done.stdout
