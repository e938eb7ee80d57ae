"""The commands `kvp promote` and `kvp rollback`: choose the champion by hand."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from flows.commands.options import HomeOption, JsonOption
from flows.runtime.process import prepared_home, standard_output_kept_clean

if TYPE_CHECKING:
    from storage.catalog.catalog import Catalog

ReasonOption = Annotated[str, typer.Option(help="Why, for the record", metavar="TEXT")]


def promote(
    policy: Annotated[
        str | None,
        typer.Argument(metavar="POLICY", help="A policy set, 6+ first characters do [default: the newest challenger]"),
    ] = None,
    reason: ReasonOption = "by hand",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a policy set the champion of its model, whatever was decided on it."""
    opened = prepared_home(home)
    with standard_output_kept_clean():
        from storage.catalog.catalog import Catalog
        from storage.catalog.promotions import MANUAL
        from tasks.promote import promote_by_hand

        catalog = Catalog(opened)
        wanted = _only_challenger(catalog) if policy is None else catalog.lineage(policy, "down").root
        row = promote_by_hand(opened, wanted, reason=reason)
    is_new = (row["kind"], row["reason"]) == (MANUAL, reason)
    _print(catalog, row, as_json, note="" if is_new else "; it was so already, and nothing was recorded")


def rollback(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Its model, 6+ first characters do [default: the only one with a champion]"
        ),
    ] = None,
    reason: ReasonOption = "by hand",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the champion before the present one champion again; a second time the one before that."""
    opened = prepared_home(home)
    with standard_output_kept_clean():
        from storage.catalog.catalog import Catalog
        from tasks.promote import roll_back

        catalog = Catalog(opened)
        digest = _only_model(catalog, "rollback") if model is None else _digest_of(catalog, model)
        row = roll_back(opened, digest, reason=reason)
    _print(catalog, row, as_json)


def _only_challenger(catalog: "Catalog") -> str:
    from storage.catalog.promotions import read_history

    return read_history(catalog, _only_model(catalog, "promote")).challenger or _refuse(
        "promote: no evaluation has made a challenger here: name a policy set"
    )


def _only_model(catalog: "Catalog", command: str) -> str:
    """Digest of the one model that there are decisions on."""
    from storage.catalog.promotions import decided_models

    digests = decided_models(catalog)
    if len(digests) == 1:
        return digests[0]
    if not digests:
        _refuse(f"{command}: there is no champion here yet: run the pipeline first")
    names = ", ".join(_model_names(catalog, digest) for digest in digests)
    what = "a policy set" if command == "promote" else "one of them"
    _refuse(f"{command}: {len(digests)} models have champions, {names}: name {what}")


def _digest_of(catalog: "Catalog", any_id: str) -> str:
    artifact_id = catalog.lineage(any_id, "down").root
    if not artifact_id.startswith("model-"):
        _refuse(f"rollback: {artifact_id} is no model: see `kvp models`")
    return catalog.artifact(artifact_id).digest


def _refuse(message: str) -> NoReturn:
    from kvpolicy.errors import InputError

    raise InputError(message)


def _model_names(catalog: "Catalog", digest: str) -> str:
    from storage.tables.lance_table import quote

    rows = catalog.rows("models", f"digest = {quote(digest)}", ["model_id", "name"])
    return f"{rows[0]['name']} ({rows[0]['model_id']})" if rows else digest[:16]


def _print(catalog: "Catalog", row: Mapping[str, Any], as_json: bool, *, note: str = "") -> None:
    if as_json:
        print(json.dumps(dict(row), default=str, allow_nan=False))
        return
    model = _model_names(catalog, row["model_digest"])
    before = f" in place of {row['champion_before_id']}" if row["champion_before_id"] else ""
    print(f"{row['champion_id']} is champion of {model}{before} ({row['kind']}): {row['reason']}{note}")
