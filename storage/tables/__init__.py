"""Rows in Lance tables and Parquet files: schemas, views, compaction."""
