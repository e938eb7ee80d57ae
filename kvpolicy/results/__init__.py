"""Scores and what follows from them: metrics, budget curves with intervals, comparisons, promotion."""
