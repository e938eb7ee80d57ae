"""OpenLineage: events built of recorded runs, and their delivery."""
