"""Training objectives: eviction cost, two estimators of its gradient, and supervised surrogates."""
