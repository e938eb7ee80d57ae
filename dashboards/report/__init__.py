"""The report of an evaluation: its rows, its sections, and its two formats."""
