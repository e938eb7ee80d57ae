"""Prefect flows and the `kvp` command: wiring only."""
