"""The science of kvpolicy: models, importance, rankings, objectives, policies, methods, benchmarks and statistics.

Pure functions on tensors and plain values. This package knows nothing of Prefect, MLflow, Zarr or Lance.

To use a policy that was trained: `from kvpolicy import load_model, load_policy, compressed_generate`.
"""

import pkgutil
from typing import Any

_PUBLIC = {
    "Generation": "kvpolicy.inference.generation:Generation",
    "InputError": "kvpolicy.errors:InputError",
    "compressed_generate": "kvpolicy.inference.generation:compressed_generate",
    "load_model": "kvpolicy.inference.loading:load_model",
    "load_policy": "kvpolicy.policies.policy_set:load_policy",
}
__all__ = list(_PUBLIC)  # the types that editors see are in __init__.pyi


def __getattr__(name: str) -> Any:
    # Loaded when they are asked for, as torch takes seconds. Not by an import statement: the fingerprints of stages
    # follow those (storage.fingerprints), and a change of what only users call is no reason to collect traces anew.
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return pkgutil.resolve_name(_PUBLIC[name])


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
