"""What a run leaves in Prefect and in MLflow's registry: one page with curves, links and the decision."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from prefect.artifacts import create_markdown_artifact

from flows.runtime.process import home_path
from kvpolicy.errors import message_with_notes
from kvpolicy.names import MEAN_TASK
from kvpolicy.results.metrics import FIDELITY
from storage.catalog.promotions import PROMOTED
from storage.home import Home
from storage.mlflow.tracking import Tracking


def leave_artifact(home: Home, summary: Mapping[str, Any]) -> None:
    """Leave the page with the flow run around this call and with the policy set in the registry.

    In Prefect pages of one model are versions of one artifact.

    Args:
        home: The home.
        summary: As of `flows.display.summary.summarise`.
    """
    page, name = run_markdown(summary), summary["model"]["name"]
    key = f"retrain-{summary['model']['digest'][:8]}"
    create_markdown_artifact(page, key=key, description=f"Budget curves of {name}, and which policy set is champion")
    Tracking(home).describe_policy(summary["policy_set"]["id"], page)


@contextmanager
def leaving_failure(*, model: str, preset: str, home: str | None, seed: int, **_: Any) -> Iterator[None]:
    """If the block fails, leave a page that says where and why: the stage, its run and the error.

    Args:
        model: The model, as it was asked for; like all of these for the page, which shows no other options.
        preset: The preset.
        home: The home.
        seed: The seed.
    """
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # the cause may be the server or the home
            lines = [f"# Failed: {model}", "", message_with_notes(error), ""]
            lines += [f"- preset `{preset}`, seed {seed}, home `{home_path(home)}`", ""]
            lines += ["What was finished is kept: mend the cause, then run the same command or deployment again."]
            create_markdown_artifact("\n".join(lines), key="retrain-failed", description=f"Why {model} has no policies")
        raise


def run_markdown(summary: Mapping[str, Any]) -> str:
    """The page of a run.

    Args:
        summary: As of `flows.display.summary.summarise`.
    """
    evaluation, home = summary["evaluation"]["id"], shlex.quote(summary["home"])
    lines = [f"# {summary['model']['name']}", ""]
    lines += [f"**Decision**: {decision_line(summary['promotion'], summary['policy_set']['id'])}", ""]
    panels = dict.fromkeys((row["benchmark"], row["setting"]) for row in summary["curves"])
    for benchmark, setting in panels:
        lines += _curves(summary["curves"], benchmark, setting)
    lines += [
        f"- policy set `{summary['policy_set']['id']}` in `{summary['policy_set']['path']}`, trained on "
        f"`{summary['trace_snapshot']['id']}`: `kvp lineage {summary['policy_set']['id']} --home {home}`",
        f"- evaluation `{evaluation}`: `kvp report {evaluation} --home {home}`",
        f"- MLflow: `mlflow ui --backend-store-uri {summary['mlflow_tracking_uri']}`",
        "",
    ]
    return "\n".join(lines)


def decision_line(promotion: Mapping[str, Any] | None, policy_set_id: str) -> str:
    """What was decided on a policy set, in one line.

    Args:
        promotion: Row of the catalog's table `promotions`; None where nothing was to decide.
        policy_set_id: The policy set.
    """
    if promotion is None:
        return f"none on {policy_set_id}: it is the champion already, or kvp was not evaluated"
    if promotion["decision"] == PROMOTED:
        return f"{policy_set_id} became champion: {promotion['reason']}"
    return f"{promotion['champion_id']} stays champion, not {policy_set_id}: {promotion['reason']}"


def _curves(rows: list[Mapping[str, Any]], benchmark: str, setting: str) -> Iterator[str]:
    """A table of methods by budgets: the mean over tasks and seeds of the KL divergence."""
    values: dict[str, dict[int, list[float]]] = {}
    wanted = (benchmark, setting, FIDELITY, MEAN_TASK)
    for row in rows:
        if (row["benchmark"], row["setting"], row["metric"], row["task"]) == wanted:
            values.setdefault(row["method"], {}).setdefault(row["budget"], []).append(row["value"])
    budgets = sorted({budget for of_method in values.values() for budget in of_method})
    yield f"Mean KL divergence from the full cache in nats, {benchmark}, {setting}, by budget in tokens:"
    yield ""
    yield f"| method | {' | '.join(map(str, budgets))} |"
    yield f"|---|{'---:|' * len(budgets)}"
    for method, of_method in values.items():
        means = (sum(of_method[budget]) / len(of_method[budget]) for budget in budgets)
        yield f"| {method} | {' | '.join(f'{mean:.4f}' for mean in means)} |"
    yield ""
