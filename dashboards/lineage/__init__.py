"""Lineage as a picture and a page: groups, layers, SVG."""
