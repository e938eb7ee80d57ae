"""The science of kvpolicy: models, importance, rankings, objectives, policies, methods, benchmarks and statistics.

Pure functions on tensors and plain values. This package knows nothing of Prefect, MLflow, Zarr or Lance.
"""
