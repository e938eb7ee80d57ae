"""What makes a place a trace store: one small object, which names its manifest.

It is put by whoever comes first, and only when the manifest that it names is whole. So of two writers that begin a
store at once one makes it, and a store is either there or not, in a folder as in an object store. (Of two Lance writers
that create one table at once, the second replaces the rows of the first, and both report success:
github.com/lance-format/lance/issues/4451.)
"""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path

from storage.errors import StorageError
from storage.traces.manifest import Manifest
from storage.traces.places import Place

FORMAT_VERSION = 3
_MARKER = "store.json"
FRAGMENTS = "fragments"
_MANIFEST = re.compile(r"manifest-[0-9a-f]{32}\.lance")


def find_manifest(place: Place) -> Manifest | None:
    """Return the manifest of the store at a place; None if there is no store.

    What is left of a store whose marker or manifest is gone is none either, but it must not be taken for an empty one:
    nothing would seem to need its fragments.

    Raises:
        StorageError: if the place cannot be reached, or its store is damaged or of another version.
    """
    content = place.read(_MARKER)
    if content is None:
        if place.folders(FRAGMENTS):
            raise StorageError(
                f"{place.join(_MARKER)} is missing where fragments lie: put"
                f' {{"format_version": {FORMAT_VERSION}, "manifest": "manifest-….lance"}} there, the name of the folder'
            )
        return None
    try:
        marker = json.loads(content)
        version, name = marker["format_version"], marker["manifest"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(f"{place.join(_MARKER)} is damaged: restore it, or collect into another place") from error
    if version != FORMAT_VERSION:
        raise StorageError(
            f"trace store {place.url} has format version {version!r}, expected {FORMAT_VERSION}: use the release that"
            " made it, or another place"
        )
    if not isinstance(name, str) or not _MANIFEST.fullmatch(name):
        raise StorageError(f"{place.join(_MARKER)} names {name!r}, which is no manifest: restore it")
    if place.is_local and not Path(place.join(name)).is_dir():  # of an object store Lance says so itself
        raise StorageError(f"manifest {place.join(name)} is missing, which {_MARKER} names: restore that folder")
    return Manifest(uri=place.join(name), options=place.table_options)


def make_manifest(place: Place) -> Manifest:
    """Return the manifest of the store at a place, and make the store if there is none.

    Raises:
        StorageError: as `find_manifest`, or if it cannot be made.
    """
    manifest = find_manifest(place)
    if manifest is not None:
        return manifest
    name = f"manifest-{uuid.uuid4().hex}.lance"
    made = Manifest(uri=place.join(name), options=place.table_options)
    made.create()
    marker = json.dumps({"format_version": FORMAT_VERSION, "manifest": name})
    if place.create(_MARKER, marker.encode()):
        return made
    place.remove(name, first="")
    return make_manifest(place)  # somebody else's by now
