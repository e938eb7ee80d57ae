"""What a valid OpenLineage event is: the published schemas, and ours for our own facet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jsonschema import Draft202012Validator, FormatChecker
from referencing import Registry, Resource

ROOT = Path(__file__).parents[2]
SCHEMAS = [
    *Path(__file__).with_name("openlineage_spec").glob("*.json"),
    *(ROOT / "storage" / "openlineage" / "facets").glob("*.json"),
]
REGISTRY: Registry[Any] = Registry().with_resources(
    (schema["$id"], Resource.from_contents(schema)) for schema in (json.loads(path.read_text()) for path in SCHEMAS)
)
FORMATS = FormatChecker(("date-time", "uuid"))


@FORMATS.checks("uri", raises=ValueError)
def _is_uri(value: object) -> bool:
    return not isinstance(value, str) or bool(urlsplit(value).scheme)


def problems(event: dict[str, Any]) -> list[str]:
    """What is wrong with an event: by the core schema, and by the schema that each facet names."""
    found = _errors("https://openlineage.io/spec/2-0-2/OpenLineage.json", event)
    for facet in _facets(event):
        found += _errors(facet["_schemaURL"], facet)
    return found


def _errors(url: str, value: Any) -> list[str]:
    validator = Draft202012Validator({"$ref": url}, registry=REGISTRY, format_checker=FORMATS)
    return [f"{url}: {error.json_path}: {error.message}" for error in validator.iter_errors(value)]


def _facets(value: Any) -> list[dict[str, Any]]:
    """Everything that calls itself a facet, wherever it is."""
    if isinstance(value, dict):
        below = [facet for part in value.values() for facet in _facets(part)]
        return [value, *below] if "_schemaURL" in value else below
    return [facet for part in value for facet in _facets(part)] if isinstance(value, list) else []
