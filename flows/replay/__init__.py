"""Stages that ran before: what would run again now and why, and a stage run once more from its record."""
