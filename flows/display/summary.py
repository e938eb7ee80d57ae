"""What a pipeline run ends with: one document for programs, and tables for people."""

import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dashboards.terminal_tables import curve_table, stage_table
from flows.display.figures import figure_folder
from flows.display.printing import console
from flows.display.run_artifact import decision_line
from storage.catalog.catalog import Catalog
from storage.catalog.promotions import read_history
from storage.home import Home

_CURVE_COLUMNS = (
    "method",
    "benchmark",
    "task",
    "setting",
    "metric",
    "budget",
    "value",
    "ci_low",
    "ci_high",
    "n",
    "seed",
    "mlflow_run_id",
)
_COMPARED = [
    "benchmark",
    "setting",
    "metric",
    "budget",
    "other",
    "difference",
    "ci_low",
    "ci_high",
    "confidence",
    "verdict",
    "n",
]
_DECIDED = (
    "decision",
    "reason",
    "challenger_id",
    "champion_before_id",
    "champion_id",
    "setting",
    "difference",
    "ci_low",
    "ci_high",
    "worst_budget",
    "worst_change",
    "margin",
    "n",
    "run_id",
)
_CONTESTS = "run_id = '{run_id}' AND method = 'kvp' AND is_contest"
# Close to another one that is printed, or about few samples: the report has them.
_NOT_PRINTED = frozenset({"kl_answer", "accuracy_normalised", "missed_mass", "reward_correlation"})


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """How a stage went.

    Attributes:
        artifact_id: What it made, or found again.
        run_id: The run that made it; empty for what no stage makes.
        seconds: That it took now.
        skipped: Whether its result was there already.
    """

    artifact_id: str
    run_id: str
    seconds: float
    skipped: bool


def summarise(home: Home, stages: Mapping[str, StageReport]) -> dict[str, Any]:
    """The document of `kvp run --json` (docs/json.md): everything that another program needs to go on."""
    catalog = Catalog(home)
    model = catalog.artifact(stages["prepare"].artifact_id)
    policy = catalog.artifact(stages["train"].artifact_id)
    evaluation = catalog.artifact(stages["evaluate"].artifact_id)
    heads = catalog.rows("heads", f"run_id = '{stages['train'].run_id}'", ["head", "head_name", "heldout_cost"])
    costs = {row["head_name"]: row["heldout_cost"] for row in sorted(heads, key=lambda row: row["head"])}
    curves = catalog.rows("curves", f"run_id = '{stages['evaluate'].run_id}'", list(_CURVE_COLUMNS))
    decided = read_history(catalog, model.digest).decision_on(policy.artifact_id, evaluation.artifact_id)
    return {
        "home": str(home.path),
        "mlflow_tracking_uri": home.mlflow_tracking_uri,
        "model": {"id": model.artifact_id, "digest": model.digest, "name": model.name},
        "policy_set": {"id": policy.artifact_id, "path": policy.uri},
        "trace_snapshot": {"id": stages["collect"].artifact_id},
        "evaluation": {"id": evaluation.artifact_id},
        "stages": {
            name: {"seconds": round(report.seconds, 3), "skipped": report.skipped} for name, report in stages.items()
        },
        "heldout_cost": {"mean": sum(costs.values()) / len(costs), "by_head": costs},
        "promotion": None if decided is None else {name: decided[name] for name in _DECIDED},
        "comparisons": catalog.rows("comparisons", _CONTESTS.format(run_id=stages["evaluate"].run_id), _COMPARED),
        "beats_all": evaluation.metadata["beats_all"],
        "figures": [str(path) for path in sorted(figure_folder(home, evaluation.artifact_id).glob("budget_curves.*"))],
        "curves": curves,
    }


def print_summary(summary: Mapping[str, Any]) -> None:
    """Tables of methods and budgets with intervals, the time of each stage, and where everything lies."""
    out = console()
    curves = summary["curves"]
    wins = {(entry["benchmark"], entry["setting"], entry["metric"]): entry["budgets"] for entry in summary["beats_all"]}
    for panel in dict.fromkeys((row["benchmark"], row["setting"], row["metric"]) for row in curves):
        benchmark, setting, metric = panel
        if metric not in _NOT_PRINTED:
            better = {int(budget): is_better for budget, is_better in wins.get(panel, {}).items()}
            out.print(curve_table(curves, metric=metric, setting=setting, benchmark=benchmark, better=better))
    out.print(stage_table(summary["stages"]))
    nothing_new = all(stage["skipped"] for name, stage in summary["stages"].items() if name != "prepare")
    if nothing_new:
        out.print("Nothing had changed: no stage was run again.")
    decided = "decided before" if nothing_new else "decision"
    lines = [
        ("held-out eviction cost", f"{summary['heldout_cost']['mean']:.3f}, mean over heads; 1 is optimal"),
        ("policy set", summary["policy_set"]["path"]),
        (decided, decision_line(summary["promotion"], summary["policy_set"]["id"])),
        *[("curves", figure) for figure in summary["figures"]],
        ("MLflow", f"{_program('mlflow')} ui --backend-store-uri {summary['mlflow_tracking_uri']}"),
        ("catalog", f'{_program("kvp")} sql --home {shlex.quote(summary["home"])} "SELECT * FROM views"'),
    ]
    for name, text in lines:  # unbroken, to be copied
        out.print(f"{name:<22}  {text}", soft_wrap=True)


def print_stage(home: Home, stage: StageReport) -> None:
    """What a single stage made or found, where it lies, and what shows it."""
    out = console()
    artifact = Catalog(home).artifact(stage.artifact_id)
    what = "was there already" if stage.skipped else "made"
    out.print(f"{artifact.artifact_id} {what} ({stage.seconds:.1f} s): {artifact.name}", soft_wrap=True)
    places = (
        [artifact.uri] if artifact.uri else sorted(figure_folder(home, artifact.artifact_id).glob("budget_curves.*"))
    )
    for place in places:
        out.print(str(place), soft_wrap=True)


def _program(name: str) -> str:
    """How a program of this environment is called from the shell: by its name where that finds it."""
    beside = Path(sys.executable).with_name(name)
    on_path = shutil.which(name)
    return str(beside) if beside.exists() and (on_path is None or not beside.samefile(on_path)) else name
