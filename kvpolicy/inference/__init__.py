"""Running a model with a compacted cache: loading and checking it, caches, streams, decoding, answers."""
