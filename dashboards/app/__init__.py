"""The dashboard: pages over the catalog of a home, drawn by a local server that only reads."""
