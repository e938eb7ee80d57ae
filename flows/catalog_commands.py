"""The command `kvp compact`: what keeps a home with thousands of runs quick, done by hand."""

from flows.command_options import HomeOption, JsonOption
from flows.process import home_path
from storage.home import Home


def compact(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Merge the small files of the catalog and of the traces' manifest, and index all rows.

    Writing does this by itself, little by little. Every earlier version stays readable.
    """
    from flows.printing import print_records
    from storage.catalog import Catalog
    from storage.traces import TraceStore

    opened = Home.open(home_path(home), create=False)
    files = {**Catalog(opened).compact(), "manifest": TraceStore(opened.traces).compact()}
    print_records(
        [{"table": name, "files_before": before, "files": after} for name, (before, after) in files.items()],
        as_json=as_json,
    )
