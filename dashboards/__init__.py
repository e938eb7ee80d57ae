"""Figures and pages drawn from what storage holds."""
