"""Loading a model with the attention function that sessions look into, and the check that it is computed as its own.

Not for finding, fetching or converting one: that is `kvpolicy.models.reference`.
"""

import dataclasses
from collections.abc import Collection
from pathlib import Path

import torch

from kvpolicy.attention.session import ATTENTION_NAME, register_attention
from kvpolicy.errors import InputError, first_line
from kvpolicy.inference.fidelity import require_own_attention
from kvpolicy.models.folder_check import require_loadable_folder
from kvpolicy.models.language_model import DTYPES, LanguageModel, read_spec
from kvpolicy.models.reference import EMBEDDED, ModelReference, resolve_model

# Without them transformers before 5.4 makes an empty tokenizer up.
_TOKENIZER_FILES = ("tokenizer.*", "vocab.*", "tekken.json", "*.model", "*.tiktoken")


def load_model(
    source: str | ModelReference = EMBEDDED, *, dtype: str = "bfloat16", device: str | None = None
) -> LanguageModel:
    """Find, fetch or convert a model, and load it.

    Args:
        source: `embedded`, a folder, a `.gguf` file, a hub id (`owner/name` or `owner/name@revision`), or a model that
            was found before.
        dtype: `bfloat16`, `float16` or `float32`.
        device: Where to run it; by default an accelerator of CUDA's if there is one, else the processor.

    Raises:
        InputError: If there is no such model, its files are damaged, or it cannot be loaded or is not supported.
    """
    reference = resolve_model(source) if isinstance(source, str) else source
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load_language_model(reference.folder, dtype=dtype, device=where)
    return dataclasses.replace(model, digest=reference.digest)


def load_language_model(folder: Path, *, dtype: str = "bfloat16", device: str = "cpu") -> LanguageModel:
    """Load a model folder in Hugging Face's format.

    Raises:
        InputError: If the folder cannot be loaded, or the architecture is not a decoder with (grouped) multi-head
            attention that transformers runs through its attention interface.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
    register_attention()
    try:
        require_loadable_folder(folder)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        spec = read_spec(config)
        if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
            raise InputError("its tokenizer cannot be loaded: none is in the folder; save it beside the weights")
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        network, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            weights_only=True,
            dtype=DTYPES[dtype],
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except InputError as error:
        raise InputError(f"model {folder}: {error}") from error
    except Exception as error:  # transformers raises dozens of types here; all mean the same to the caller
        reason = first_line(error)
        raise InputError(
            f"model {folder} cannot be loaded: {reason}; it must be a decoder whose attention goes through "
            "transformers' attention interface, saved with its tokenizer"
        ) from error
    if loading["missing_keys"]:  # transformers draws them at random
        raise InputError(
            f"model {folder}: {len(loading['missing_keys'])} weights are not in its files, such as "
            f"{min(loading['missing_keys'])}: the folder is not complete; fetch it again"
        )
    if loading["mismatched_keys"]:
        name, saved, expected = min(loading["mismatched_keys"])
        raise InputError(
            f"model {folder}: weight {name} has shape {tuple(saved)}, config.json makes it {tuple(expected)}: "
            "the two do not belong together; fetch the folder again"
        )
    network.eval().requires_grad_(False).to(device)
    model = LanguageModel(network=network, tokenizer=tokenizer, spec=spec)
    _require_fit(model, folder, loading["unexpected_keys"])
    return model


def _require_fit(model: LanguageModel, folder: Path, unused: Collection[str]) -> None:
    """Fail at load time rather than during collection."""
    if unused_layers := sorted(name for name in unused if ".layers." in name):
        raise InputError(
            f"model {folder}: {len(unused_layers)} weights of layers that config.json does not have, such as "
            f"{unused_layers[0]}: the two do not belong together; fetch it again"
        )
    try:
        require_own_attention(model)
    except InputError as error:
        raise InputError(f"model {folder}: {error}") from error
    except Exception as error:  # attention of another shape than the one that is ranked fails in many ways
        raise InputError(
            f"model {folder} cannot be run: {first_line(error)}; its attention must be (grouped) multi-head attention"
        ) from error
