"""Language models: resolving a reference to a folder, loading it, and knowing its shape and digest."""
