"""Eviction methods: everything that ranks cache entries, learned or not."""
