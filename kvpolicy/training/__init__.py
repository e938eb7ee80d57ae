"""What is trained and on what: collected attention, policies per KV head, soft tokens, objectives compared."""
