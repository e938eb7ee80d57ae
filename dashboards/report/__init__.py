"""The report of an evaluation: what it is made of, its sections, and the two forms that it is written in."""
