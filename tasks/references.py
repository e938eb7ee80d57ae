"""What travels between tasks: small references to things that lie in the home, never tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelRef:
    """A registered model.

    Attributes:
        artifact_id: In the catalog.
        digest: Of weights, configuration and tokenizer.
        name: For people.
        folder: Where it lies.
        dtype: In which it runs.
        num_heads: KV heads of all its layers.
    """

    artifact_id: str
    digest: str
    name: str
    folder: str
    dtype: str
    num_heads: int


@dataclass(frozen=True, kw_only=True)
class PromptsRef:
    """A set of prompts of one split.

    Attributes:
        artifact_id: In the catalog.
        split: `train`, `validation` or `test`.
        seed: That they were generated with.
        num_samples: How many there are.
        path: File of the samples.
        formats_digest: Of the formats that the model's chat template rendered; empty if it is not recorded.
    """

    artifact_id: str
    split: str
    seed: int
    num_samples: int
    path: str
    formats_digest: str = ""


@dataclass(frozen=True, kw_only=True)
class SnapshotRef:
    """A snapshot of a trace collection.

    Attributes:
        artifact_id: In the catalog.
        collection: Key of the collection.
        manifest_version: Version of the manifest that has it.
        setting: Whose contexts and futures the traces are.
    """

    artifact_id: str
    collection: str
    manifest_version: int
    setting: str


@dataclass(frozen=True, kw_only=True)
class TrainedRef:
    """What methods are made from: a policy set, or soft tokens.

    Attributes:
        artifact_id: In the catalog.
        kind: `policy_set` or `soft_tokens`.
        path: Its folder.
        seed: That it was trained with.
    """

    artifact_id: str
    kind: str
    path: str
    seed: int

    @property
    def role(self) -> str:
        """What it is to a run that reads it."""
        return f"{'policy' if self.kind == 'policy_set' else self.kind}_{self.seed}"


@dataclass(frozen=True, kw_only=True)
class ShardRef:
    """Figures of some examples.

    Attributes:
        artifact_id: In the catalog.
        path: Folder of their scores and of what rankings cost each head.
    """

    artifact_id: str
    path: str


@dataclass(frozen=True, kw_only=True)
class EvaluationRef:
    """A finished evaluation: its curves are in the catalog and in MLflow.

    Attributes:
        artifact_id: In the catalog.
        run_id: The run whose rows are its curves.
        mlflow_run_id: The MLflow run that its curves are nested under.
    """

    artifact_id: str
    run_id: str
    mlflow_run_id: str
