"""Models of MLflow's registry: how they are named, and which of the files that were logged make a model folder.

Nothing is asked of the registry or fetched here: `tasks.model` does so through `storage.mlflow.registered_models`.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy.errors import InputError

PREFIX = "models:/"
_FLAVOR = "transformers"
_NOT_IN_A_FOLDER = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
class RegisteredName:
    """A model of the registry as it is asked for.

    Attributes:
        name: Of the registered model.
        number: Of the version; empty if an alias says which, or for the newest.
        alias: Of the version; empty if its number says which, or for the newest.
    """

    name: str
    number: str = ""
    alias: str = ""

    @classmethod
    def of_source(cls, text: str) -> "RegisteredName":
        """Read `NAME` or `NAME@ALIAS`.

        Raises:
            InputError: If it is of no such form.
        """
        name, at, alias = text.rpartition("@") if "@" in text else (text, "", "")
        if not name.strip() or {"/", ":", "'"} & set(text) or bool(at) != bool(alias):
            raise InputError(f"{text!r} names no registered model: expected NAME or NAME@ALIAS, without / and :")
        return cls(name=name, alias=alias)

    @classmethod
    def of_reference(cls, reference: str) -> "RegisteredName":
        """Read `models:/NAME/VERSION` or `models:/NAME@ALIAS`.

        Raises:
            InputError: If it is of no such form.
        """
        named, _, number = reference.removeprefix(PREFIX).partition("/")
        try:
            name = cls.of_source(named)
        except InputError:
            name = None
        if name is None or bool(name.alias) == bool(number) or (number and not number.isdecimal()):
            raise InputError(
                f"model {reference!r} is no version in MLflow's registry: expected {PREFIX}NAME/VERSION with a number, "
                f"or {PREFIX}NAME@ALIAS"
            )
        return cls(name=name.name, number=number, alias=name.alias)


def is_registered(reference: str) -> bool:
    """Whether a reference is to MLflow's registry."""
    return reference.startswith(PREFIX)


def registered_place(name: str, identity: str, cache: Path) -> Path:
    """Folder of a version in `cache`, whether it is there or not.

    Args:
        name: Of the registered model.
        identity: Digest of what tells the version from every other; it stands for its content, which never changes.
        cache: Where models are kept.
    """
    return cache / "models" / f"{_NOT_IN_A_FOLDER.sub('-', name)}-{identity[:12]}"


def model_parts(reference: str, files: Collection[str], flavors: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Folders of a version whose files make one model folder; of files of one name the later folder's count.

    MLflow's transformers flavour has weights and configuration in one folder and the tokenizer in another. A version
    may also be a model folder as it is.

    Args:
        reference: The version, for the error.
        files: Files and folders in its root.
        flavors: What MLflow's record says of each flavour; empty if it was not logged as one of them.

    Returns:
        Paths from the version's root; the root itself is empty.

    Raises:
        InputError: If it is another thing than a language model with its weights and its tokenizer.
    """
    if "config.json" in files:
        return [""]
    logged = flavors.get(_FLAVOR)
    if logged is None:
        what = f"is of flavour {', '.join(sorted(flavors))}" if flavors else f"has {', '.join(sorted(files)[:5])}"
        raise InputError(
            f"{reference} {what}: expected a model folder with config.json, or MLflow's flavour {_FLAVOR!r}"
        )
    if logged.get("peft_adaptor"):
        raise InputError(f"{reference} is an adapter: merge it into its model and log that")
    if not logged.get("model_binary"):
        named = logged.get("local_base_model_path") or logged.get("source_model_name")
        raise InputError(f"{reference} has no weights, it only names {named}: log it with save_pretrained=True")
    if "tokenizer" not in (logged.get("components") or ()):
        raise InputError(f"{reference} has no tokenizer: log the model together with it")
    return [str(logged["model_binary"]), "components/tokenizer"]
