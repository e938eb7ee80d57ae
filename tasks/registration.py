"""A policy set as a version of a model in MLflow's registry, registered again where people deleted it there.

The catalog is the record: whatever MLflow has lost of a policy set is made again of it.
"""

from storage.catalog.catalog import Catalog
from storage.errors import StorageError
from storage.home import Home
from storage.mlflow.deletions import has_run
from storage.mlflow.tracking import POLICY_SET_TAG, Tracking
from storage.tables.lance_table import quote


def register_policy_set(home: Home, policy_set_id: str, *, model_id: str, snapshot_id: str, run_id: str) -> None:
    """Register a policy set; doing it again changes nothing, and mends a version that was deleted or lost its files.

    Args:
        home: The home.
        policy_set_id: Its artifact.
        model_id: Artifact of the model that it was trained for.
        snapshot_id: Artifact of the traces that it was trained on.
        run_id: MLflow run of its training.

    Raises:
        StorageError: If MLflow refuses it, or its folder is lost.
    """
    policy, model = Catalog(home).artifacts([policy_set_id, model_id])
    Tracking(home).register_policy(
        name=f"kvpolicy-{model.name}-{model.digest[:8]}",  # models of one name share no policies
        folder=policy.uri,
        run_id=run_id,
        tags={POLICY_SET_TAG: policy_set_id, "kvp.trace_snapshot_id": snapshot_id},
        description=f"Eviction policies of every KV head of {model.name}, trained on {snapshot_id}",
    )


def ensure_registered(home: Home, policy_set_id: str) -> None:
    """Register a policy set of the catalog again, unless MLflow's registry has it with its files.

    Raises:
        StorageError: If no training in this home made it, MLflow refuses it, or its folder is lost.
    """
    tracking, catalog = Tracking(home), Catalog(home)
    if tracking.has_policy(policy_set_id):
        return
    edges = catalog.rows("edges", f"artifact_id = {quote(policy_set_id)} AND role = 'output'", ["run_id"])
    names = ", ".join(quote(edge["run_id"]) for edge in edges)
    made = catalog.rows("runs", f"run_id IN ({names}) AND outcome = 'completed'") if edges else []
    if not made:
        raise StorageError(
            f"{policy_set_id} is not in MLflow's registry, and no training in this home made it: choose another one"
        )
    training = catalog.completed_run(made[-1])
    model_id, snapshot_id, run_id = training.inputs["model"], training.inputs["snapshot"], training.mlflow_run_id
    if not has_run(home, run_id):  # with the whole database, or by `mlflow gc`; its curves are in the catalog
        model, snapshot = catalog.artifacts([model_id, snapshot_id])
        timestamp_ms = catalog.created_at_ms(snapshot.artifact_id)
        run_id = tracking.start_parent(
            experiment=model.name,
            name=f"{policy_set_id}, registered again",
            tags={"kvp.stage": "train", "kvp.model_id": model_id, POLICY_SET_TAG: policy_set_id},
            timestamp_ms=timestamp_ms,
        )
        tracking.finish(run_id, timestamp_ms=timestamp_ms)
    register_policy_set(home, policy_set_id, model_id=model_id, snapshot_id=snapshot_id, run_id=run_id)
