"""How a task becomes a stage: declaration, key, lock, record, repair, progress."""
