"""The process of a command: environment, streams, and settings of this machine."""
