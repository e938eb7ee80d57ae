"""OpenLineage's datasets: how artifacts are named there, and what is said of each.

An artifact never changes and is named by its content, so a dataset here has one version. The same content has the same
name in every home; where it lies is a facet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from openlineage.client import event_v2
from openlineage.client.facet_v2 import (
    DatasetFacet,
    OutputDatasetFacet,
    dataset_type_dataset,
    dataset_version_dataset,
    datasource_dataset,
    documentation_dataset,
    output_statistics_output_dataset,
    schema_dataset,
)

from storage.lineage.artifacts import SURROUNDINGS, Artifact
from storage.tables.parquet import columns_of
from storage.tables.schemas import TABLES
from storage.traces.fragment_content import ARRAYS
from storage.traces.manifest import SCHEMA as MANIFEST

if TYPE_CHECKING:
    import pyarrow as pa

DATASET_NAMESPACE = "kvpolicy"
_TYPES = {"model": "MODEL", "policy_set": "MODEL", "head_group": "MODEL", "curve": "TABLE", "evaluation": "TABLE"}

Field = schema_dataset.SchemaDatasetFacetFields


def is_data(artifact: Artifact) -> bool:
    """Whether an artifact is a dataset; OpenLineage has facets of job and run for code, environment and request."""
    return artifact.kind not in SURROUNDINGS


def input_dataset(artifact: Artifact, producer: str) -> event_v2.InputDataset:
    """Return an artifact as a dataset that a run reads."""
    return event_v2.InputDataset(DATASET_NAMESPACE, artifact.artifact_id, facets=_facets(artifact, producer))


def output_dataset(artifact: Artifact, producer: str, num_points: int | None = None) -> event_v2.OutputDataset:
    """Return an artifact as a dataset that a run made.

    Args:
        artifact: the artifact.
        producer: URI of the program that says so.
        num_points: points, if it is a curve.
    """
    rows, size = artifact.metadata.get("num_samples", num_points), artifact.metadata.get("num_bytes")
    statistics: dict[str, OutputDatasetFacet] = {}
    if rows is not None or size is not None:
        statistics["outputStatistics"] = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
            rowCount=rows, size=size, producer=producer
        )
    return event_v2.OutputDataset(
        DATASET_NAMESPACE, artifact.artifact_id, facets=_facets(artifact, producer), outputFacets=statistics
    )


def _facets(artifact: Artifact, producer: str) -> dict[str, DatasetFacet]:
    kind = dataset_type_dataset.DatasetTypeDatasetFacet(
        datasetType=_TYPES.get(artifact.kind, "FILE"), subType=artifact.kind.upper(), producer=producer
    )
    facets: dict[str, DatasetFacet] = {
        "version": dataset_version_dataset.DatasetVersionDatasetFacet(artifact.digest, producer=producer),
        "datasetType": kind,
        "documentation": documentation_dataset.DocumentationDatasetFacet(artifact.name, producer=producer),
    }
    if artifact.uri:
        place = artifact.uri if "://" in artifact.uri else Path(artifact.uri).as_uri()
        facets["dataSource"] = datasource_dataset.DatasourceDatasetFacet(
            name=urlsplit(place).scheme, uri=place, producer=producer
        )
    if fields := _fields(artifact):
        facets["schema"] = schema_dataset.SchemaDatasetFacet(fields=fields, producer=producer)
    return facets


_ROWS = ".parquet"
_OF_EVALUATION = ("scores", "comparisons", "findings", "head_costs")


def _fields(artifact: Artifact) -> list[Field]:
    """Columns of tables, arrays of traces, and otherwise the columns of the files, if they have any."""
    of_kind: Mapping[str, Callable[[], list[Field]]] = {
        "trace_fragment": _arrays,
        "trace_snapshot": lambda: _columns(MANIFEST),
        "evaluation": lambda: _tables({name: TABLES[name] for name in _OF_EVALUATION}),
        "curve": lambda: _columns(TABLES["curves"]),
    }
    return of_kind[artifact.kind]() if artifact.kind in of_kind else _columns_of_files(artifact.uri)


def _columns_of_files(uri: str) -> list[Field]:
    if uri.endswith(_ROWS):
        return _columns(columns_of(Path(uri)))
    return _tables({path.stem: columns_of(path) for path in sorted(Path(uri).glob(f"*{_ROWS}"))} if uri else {})


def _tables(tables: Mapping[str, Iterable[pa.Field]]) -> list[Field]:
    return [Field(name=name, type="table", fields=_columns(columns)) for name, columns in tables.items()]


def _arrays() -> list[Field]:
    shapes = {"keys": "array(head, token, dim)", "values": "array(head, token, dim)"}
    return [Field(name=name, type=shapes.get(name, "array(head, token) of float32")) for name in ARRAYS]


def _columns(columns: Iterable[pa.Field]) -> list[Field]:
    return [
        Field(name=column.name, type=str(column.type), description=_description(column), ordinal_position=index)
        for index, column in enumerate(columns, start=1)
    ]


def _description(column: pa.Field) -> str | None:
    text = (column.metadata or {}).get(b"description")
    return None if text is None else text.decode()
