"""The commands that list what can be chosen: `methods`, `benchmarks` and `models`."""

from flows.commands.options import HomeOption, JsonOption
from flows.runtime.process import existing_home


def methods(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List the eviction methods."""
    from flows.display.printing import print_records
    from kvpolicy.methods.registry import method_names, method_type

    del home  # every command takes it; this one needs none
    records = [
        {"method": name, "description": method_type(name).description, "reference": method_type(name).reference}
        for name in method_names()
    ]
    print_records(records, as_json=as_json)


def benchmarks(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List the benchmarks and their tasks."""
    from flows.display.printing import print_records
    from kvpolicy.benchmarks.registry import BENCHMARKS

    del home
    records = [
        {
            "benchmark": info.benchmark,
            "version": info.version,
            "task": info.task,
            "needs": info.source or "",
            "metrics": ", ".join(info.metrics),
            "max_new_tokens": info.max_new_tokens,
            "description": info.description,
        }
        for name in BENCHMARKS.names
        for info in BENCHMARKS[name].tasks
    ]
    print_records(records, as_json=as_json)


def models(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List the models that this home knows."""
    from flows.display.printing import print_rows
    from storage.catalog.catalog import Catalog

    columns = "model_id, name, source, revision, architecture, num_layers, num_kv_heads, head_dim, max_positions"
    rows = Catalog(existing_home(home)).sql(f"SELECT {columns} FROM models ORDER BY created_at")
    print_rows(rows, "json" if as_json else "table")
