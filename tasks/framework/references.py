"""What travels between tasks: small references to things that lie in the home, never tensors."""

from dataclasses import dataclass

from storage.catalog.catalog import Catalog
from storage.home import Home


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
        benchmarks: Names of the benchmarks that they are of.
    """

    artifact_id: str
    split: str
    seed: int
    num_samples: int
    path: str
    formats_digest: str = ""
    benchmarks: tuple[str, ...] = ()


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
class ContenderRef:
    """A method that takes part in an evaluation.

    Attributes:
        method: Name of the method.
        seed: That its policy or its draws come from.
        trained: What it is made from, if anything.
    """

    method: str
    seed: int
    trained: TrainedRef | None = None

    @property
    def label(self) -> str:
        """What tells it apart from the others, in names of artifacts and roles."""
        return f"{self.method} {self.seed}"


@dataclass(frozen=True, kw_only=True)
class ShardRef:
    """Figures of one contender on some examples.

    Attributes:
        artifact_id: In the catalog.
        path: Folder of the scores and of what rankings cost each head.
        role: What it is to a run that reads it.
    """

    artifact_id: str
    path: str
    role: str


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


def prompts_ref(home: Home, artifact_id: str, seed: int) -> PromptsRef:
    """The reference of a prompt set in the catalog, given the seed that it was generated with."""
    artifact = Catalog(home).artifact(artifact_id)
    return PromptsRef(
        artifact_id=artifact_id,
        split=str(artifact.metadata["split"]),
        seed=seed,
        num_samples=int(artifact.metadata["num_samples"]),
        path=artifact.uri,
        formats_digest=str(artifact.metadata.get("formats_digest", "")),
        benchmarks=tuple(artifact.metadata.get("benchmarks", ())),
    )


def snapshot_ref(home: Home, artifact_id: str, seed: int = 0) -> SnapshotRef:
    """The reference of a snapshot in the catalog."""
    artifact = Catalog(home).artifact(artifact_id)
    return SnapshotRef(
        artifact_id=artifact_id,
        collection=str(artifact.metadata["collection"]),
        manifest_version=int(artifact.metadata["manifest_version"]),
        setting=str(artifact.metadata["setting"]),
    )


def trained_ref(home: Home, artifact_id: str, seed: int = 0) -> TrainedRef:
    """The reference of a policy set, or of soft tokens, in the catalog."""
    artifact = Catalog(home).artifact(artifact_id)
    return TrainedRef(
        artifact_id=artifact_id, kind=artifact.kind, path=artifact.uri, seed=int(artifact.metadata["seed"])
    )
