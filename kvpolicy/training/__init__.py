"""Training and its input: collected attention, policies per KV head, soft tokens, objectives compared."""
