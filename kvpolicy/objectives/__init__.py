"""Training objectives: eviction cost and the two estimators of its gradient."""
