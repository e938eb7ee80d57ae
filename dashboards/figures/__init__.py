"""Figures that are drawn from rows once, for the dashboard and the report alike."""
