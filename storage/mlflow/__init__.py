"""MLflow: curve runs, policy sets and models in its registry, and what was deleted there."""
