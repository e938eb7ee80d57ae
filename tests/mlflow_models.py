"""Models in MLflow's registry of a home, put there as other people would: with MLflow's own functions."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storage.home import Home
from storage.mlflow.client import open_client


def log_transformers(home: Home, folder: Path, name: str, **options: Any) -> str:
    """Log a model folder in MLflow's transformers flavour and return the version that it has become."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _logging_to(home) as mlflow:
        model = {
            "model": AutoModelForCausalLM.from_pretrained(folder, local_files_only=True),
            "tokenizer": AutoTokenizer.from_pretrained(folder, local_files_only=True),
        }
        about = {"task": "text-generation", "pip_requirements": ["transformers"], "registered_model_name": name}
        logged = mlflow.transformers.log_model(model, name="model", **(about | options))
    return str(logged.registered_model_version)


def log_folder(home: Home, folder: Path, name: str) -> str:
    """Log a folder as it is and return the version that it has become."""
    with _logging_to(home) as mlflow:
        client = mlflow.MlflowClient()
        run = mlflow.active_run().info
        mlflow.log_artifacts(str(folder), "as it is")
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name)
        version = client.create_model_version(name, f"{run.artifact_uri}/as it is", run.run_id)
    return str(version.version)


@contextmanager
def _logging_to(home: Home) -> Iterator[Any]:
    """MLflow's functions in a run of their own, with the database of a home."""
    client = open_client(home)
    import mlflow

    logging.getLogger("mlflow").setLevel(logging.ERROR)
    uri = home.mlflow_tracking_uri
    before = mlflow.get_tracking_uri(), mlflow.get_registry_uri()
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    try:
        known = client.get_experiment_by_name("others")
        place = (home.mlflow_artifacts / "others").as_uri()
        experiment = known.experiment_id if known else client.create_experiment("others", artifact_location=place)
        with mlflow.start_run(experiment_id=experiment), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLflow (3.17) warns of its own type hints while it is imported
            yield mlflow
    finally:
        mlflow.set_tracking_uri(before[0])
        mlflow.set_registry_uri(before[1])
