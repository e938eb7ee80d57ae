"""Converting a GGUF file to a folder in Hugging Face's format, once."""

import logging
from pathlib import Path

from kvpolicy.errors import InputError, first_line
from kvpolicy.models.gguf_config import read_config
from kvpolicy.models.gguf_file import read_gguf
from kvpolicy.models.gguf_tokenizer import read_tokenizer
from kvpolicy.models.gguf_weights import GgufWeights
from kvpolicy.models.model_folder import new_model_folder

_LOGGER = logging.getLogger(__name__)
_VERSION = 2  # of the conversion: to be raised when the same file becomes another model
_ENDS_OF_TURN = ("eot", "eom")


def converted_place(name: str, digest: str, cache: Path) -> Path:
    """Folder of a converted file, whether it is there or not; one that an earlier conversion made is not found.

    Args:
        name: Of the model.
        digest: Of the file.
        cache: Where models are kept.
    """
    return cache / "models" / f"{name}-{digest[:12]}-v{_VERSION}"


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Convert `gguf` to safetensors in bfloat16 at `folder`, which appears only when it is complete.

    The tokenizer is taken from the file as well. Whatever the file asks for is in the folder, or the file is refused;
    no weight is read before that is known.

    Raises:
        InputError: If the file is not a GGUF file that is whole, asks for something that transformers' model of its
            architecture cannot do, or this release of transformers reads none.
    """
    import transformers

    if not hasattr(transformers, "GgufConfig"):
        raise InputError(
            f"GGUF file {gguf} cannot be converted: transformers {transformers.__version__} is too old for it; install "
            "a newer one, or give the folder of a model that was converted elsewhere"
        )
    _LOGGER.info("model: converting %s, once", gguf.name)
    with new_model_folder(folder) as draft:
        file = read_gguf(gguf)
        try:
            config = read_config(file)
            weights = GgufWeights(file, config)
            tokenizer = read_tokenizer(file)
            network = weights.network()
        except InputError as error:
            raise InputError(f"GGUF file {gguf} cannot be converted: {error}") from error
        except Exception as error:  # transformers and gguf raise many types for a damaged or foreign file
            reason = first_line(error).rstrip(".")
            raise InputError(f"GGUF file {gguf} cannot be converted: {reason}; check that it is complete") from error
        ends = [file.fields.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDS_OF_TURN]
        if more := [end for end in ends if end is not None and end != config.eos_token_id]:
            network.generation_config.eos_token_id = [config.eos_token_id, *more]
        tokenizer.save_pretrained(draft)
        network.save_pretrained(draft)
