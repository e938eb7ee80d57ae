"""Prefect tasks: each reads references, calls kvpolicy, writes through storage and returns references."""
