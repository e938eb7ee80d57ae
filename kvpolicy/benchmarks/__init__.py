"""Benchmarks: generated or read samples, and how their answers are scored."""
