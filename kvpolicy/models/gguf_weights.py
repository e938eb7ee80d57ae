"""The network of a GGUF file: every tensor of it in its place, and every place filled from it."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from kvpolicy.errors import InputError
from kvpolicy.models.gguf_config import architecture_of
from kvpolicy.models.gguf_file import GgufFile
from kvpolicy.models.gguf_rope import DIVISORS, LONG, SHORT

_SHOWN = 3


class GgufWeights:
    """Where the tensors of a file belong in the network that its configuration describes.

    Making it reads no tensor, so that a file with a hole in it is refused at once.
    """

    def __init__(self, file: GgufFile, config: Any) -> None:
        """Match the tensors of a file with the parameters of an empty network.

        Raises:
            InputError: If a parameter has no tensor, a tensor no parameter, or one the shape of another.
        """
        from transformers import AutoModelForCausalLM

        self._file = file
        self._config = config
        self._architecture = architecture_of(file)
        with torch.device("meta"):
            self._network = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        self._names = _tensor_names(self._network, file, config)
        _require_match(self._names, self._network, file)

    def network(self) -> Any:
        """The network in bfloat16, with the weights of the file."""
        parameters = {}
        for parameter, name in self._names.items():
            values = self._restored(name)
            parameters[parameter] = torch.from_numpy(values).to(torch.bfloat16)
        network = self._network.to(torch.bfloat16)
        network.load_state_dict(
            parameters, strict=False, assign=True
        )  # all but tied ones, which `_require_match` saw to
        network.tie_weights()
        return network.eval()

    def _restored(self, name: str) -> Float[np.ndarray, "*shape"]:
        """A tensor as transformers has it."""
        values = self._file.values(name)
        if self._architecture.swaps_halves:
            if ".attn_q." in name:
                values = _with_halves(values, self._config.num_attention_heads)
            elif ".attn_k." in name:
                values = _with_halves(values, self._config.num_key_value_heads)
        if self._architecture.adds_one and name.endswith("norm.weight"):
            values = values - 1
        return np.ascontiguousarray(values)


def _with_halves(values: Float[np.ndarray, "row *column"], heads: int) -> Float[np.ndarray, "row *column"]:
    """Put rows that lie in pairs (0, d/2), (1, d/2 + 1), … of each head's d in the order 0 … d - 1."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _tensor_names(network: Any, file: GgufFile, config: Any) -> dict[str, str]:
    """For each parameter of a network the name of its tensor in a file of this architecture."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    (number,) = (number for number, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    known = get_tensor_name_map(number, config.num_hidden_layers)
    names = {}
    for parameter in network.state_dict():
        if parameter == "lm_head.weight" and config.tie_word_embeddings:
            continue
        base, dot, suffix = parameter.rpartition(".")
        name = known.get_name(base)
        if name is None:
            raise InputError(f"no tensor of a GGUF file is {parameter}, which the configuration has")
        names[parameter] = f"{name}{dot}{suffix}"
    return names


def _require_match(names: dict[str, str], network: Any, file: GgufFile) -> None:
    wanted = set(names.values())
    there = set(file.tensors) - {DIVISORS, SHORT, LONG}
    for tensors, problem in ((wanted - there, "are missing"), (there - wanted, "have no place in the model")):
        if tensors:
            listed = ", ".join(sorted(tensors)[:_SHOWN]) + (", …" if len(tensors) > _SHOWN else "")
            raise InputError(f"{len(tensors)} of its tensors {problem} ({listed}): copy or make it again")
    for parameter, value in network.state_dict().items():
        if parameter in names and file.shape(names[parameter]) != tuple(value.shape):
            raise InputError(
                f"tensor {names[parameter]} has shape {file.shape(names[parameter])}, its header asks for "
                f"{tuple(value.shape)}: copy or make it again"
            )
