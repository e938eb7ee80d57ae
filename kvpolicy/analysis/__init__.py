"""Questions to the reward and to scores, besides how well they do: does it survive eviction, what is its shape."""
