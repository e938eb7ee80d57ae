"""Converting a GGUF file to a folder in Hugging Face's format, once."""

import logging
from pathlib import Path

from kvpolicy.errors import InputError, first_line
from kvpolicy.models.model_folder import new_model_folder

_LOGGER = logging.getLogger(__name__)


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Convert `gguf` to safetensors in bfloat16 at `folder`, which appears only when it is complete.

    The tokenizer is taken from the file as well.

    Raises:
        InputError: If the file is not a GGUF file that transformers can read, or this release of it reads none.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not hasattr(transformers, "GgufConfig"):
        raise InputError(
            f"GGUF file {gguf} cannot be converted: transformers {transformers.__version__} is too old for it; install "
            "a newer one, or give the folder of a model that was converted elsewhere"
        )
    _LOGGER.info("model: converting %s, once", gguf.name)
    with new_model_folder(folder) as draft:
        try:
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
            network = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                quantization_config=transformers.GgufConfig(dequantize=True),
                trust_remote_code=False,
            )
        except Exception as error:  # the reader raises many types for a damaged or foreign file
            reason = first_line(error).rstrip(".")
            raise InputError(f"GGUF file {gguf} cannot be converted: {reason}; check that it is complete") from error
        tokenizer.save_pretrained(draft)
        network.to(torch.bfloat16).save_pretrained(draft)
