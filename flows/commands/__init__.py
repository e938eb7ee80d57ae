"""The `kvp` command, a file a topic; `flows.cli` puts them together."""
