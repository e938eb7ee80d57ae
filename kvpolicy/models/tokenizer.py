"""Loading the tokenizer of a model folder, without the model."""

from pathlib import Path
from typing import Any

from kvpolicy.errors import InputError, first_line


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer that lies in a model folder; code that lies beside it is not run.

    Raises:
        InputError: If it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises dozens of types here; all mean the same to the caller
        raise InputError(f"the tokenizer of model {folder} cannot be loaded: {first_line(error)}") from error
