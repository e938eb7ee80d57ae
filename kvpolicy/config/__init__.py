"""Settings, each declared once, and the registries of what a request can choose by name."""
