"""The configuration of a whole run, and its versioned presets."""
