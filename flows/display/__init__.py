"""What people see of a run: progress, tables, figures, artifacts in Prefect."""
