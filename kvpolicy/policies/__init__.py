"""Policies: the batched networks that score cached tokens, and the sets that are saved and shipped."""
