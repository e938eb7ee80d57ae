"""A table that processes of their own open quickly."""

from pathlib import Path

import pyarrow as pa

from storage.tables.lance_table import Table

SCHEMA = pa.schema([pa.field("name", pa.string(), nullable=False), pa.field("number", pa.int64())])


def table_at(folder: str | Path) -> Table:
    return Table(name="things", uri=f"{folder}/things.lance", schema=SCHEMA, indexed=("name",))
