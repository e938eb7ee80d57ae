"""The only door to Zarr, Lance, MLflow and object stores: traces, catalog, lineage and tracking."""
