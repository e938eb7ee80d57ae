"""Pages, tables, numbers and times, written in one way."""
