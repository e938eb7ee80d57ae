"""The only door to Zarr, Lance, Parquet and MLflow: traces, catalog, lineage and tracking."""
