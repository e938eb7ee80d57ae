"""Attention: capturing queries, keys and values from a forward pass, and the importance that they imply."""
