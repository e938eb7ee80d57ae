"""Figures, pages and reports from the records in storage."""
