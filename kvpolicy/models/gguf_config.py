"""From the header of a GGUF file to the configuration of a transformers model that computes the same.

Every field of the architecture is either translated here or known to change nothing; a file with any other field is
refused, as what it asks for would be dropped. A field that is missing means what it means to llama.cpp, whose format it
is. Only architectures whose translation is tested against transformers' own models are translated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.models.gguf_file import ArchitectureFields, GgufFile
from kvpolicy.models.gguf_rope import read_rope

_RMS, _LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
# Fields that llama.cpp computes nothing with: how the scaling came about, how weights once lay in another format.
_REMARKS = ("rope.scaling.finetuned", "tensor_data_layout")
_IDS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "padding_token_id",
    "unk_token_id": "unknown_token_id",
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How files of one architecture become a model.

    Attributes:
        model_type: Of transformers.
        epsilon: The header's field, and the configuration's, of the norms' epsilon.
        swaps_halves: Whether rows of query and key weights lie pairwise, where transformers has two halves of a head.
        adds_one: Whether the file's norm weights are greater by one than transformers'.
        is_partly_rotary: Whether fewer dimensions than a head has may be rotated.
        is_windowed: Whether it may have a sliding window.
    """

    model_type: str
    epsilon: tuple[str, str] = (_RMS, "rms_norm_eps")
    swaps_halves: bool = False
    adds_one: bool = False
    is_partly_rotary: bool = False
    is_windowed: bool = False


ARCHITECTURES = {
    "llama": Architecture(model_type="llama", swaps_halves=True),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3"),
    "phi3": Architecture(model_type="phi3", is_partly_rotary=True, is_windowed=True),
    "gemma3": Architecture(model_type="gemma3_text", adds_one=True, is_windowed=True),
    "stablelm": Architecture(model_type="stablelm", epsilon=(_LAYER_NORM, "layer_norm_eps"), is_partly_rotary=True),
    "starcoder2": Architecture(model_type="starcoder2", epsilon=(_LAYER_NORM, "norm_epsilon")),
}


def architecture_of(file: GgufFile) -> Architecture:
    """How files of a file's architecture become a model.

    Raises:
        InputError: If they do not, or it is no model by itself.
    """
    kind = file.fields.get("general.type", "model")
    if kind != "model" or int(file.fields.get("split.count", 1)) > 1:
        raise InputError(f"it is of type {kind!r} or one of several parts: it must be a whole model in one file")
    if file.architecture not in ARCHITECTURES:
        raise InputError(
            f"its architecture {file.architecture!r} is not one of those that are read from GGUF files here "
            f"({', '.join(ARCHITECTURES)}): pass the folder of the model it was made from"
        )
    return ARCHITECTURES[file.architecture]


def read_config(file: GgufFile) -> Any:
    """Make the configuration of transformers that a header describes.

    Raises:
        InputError: If a field is missing, or asks for what the configuration cannot say.
    """
    from transformers import AutoConfig

    architecture = architecture_of(file)
    fields = ArchitectureFields(file)
    entries = _counts(file, fields)
    name, entry = architecture.epsilon
    entries[entry] = fields.number(name)
    if not fields.take("attention.causal", True):
        raise InputError("its attention is not causal")
    for remark in _REMARKS:
        fields.take(remark)
    if architecture.is_windowed:
        entries["sliding_window"] = fields.take("attention.sliding_window") or None
    rope = read_rope(
        file,
        fields,
        head_dim=entries["head_dim"],
        max_positions=entries["max_position_embeddings"],
        is_partly_rotary=architecture.is_partly_rotary,
    )
    entries["rope_parameters"] = rope
    if file.architecture in _SPECIFIC:
        _SPECIFIC[file.architecture](file, fields, entries)
    fields.require_taken()
    entries |= _special_tokens(file)
    try:
        config = AutoConfig.for_model(architecture.model_type, **entries)
    except Exception as error:  # of several types, with the reason in its last line
        reason = str(error).strip().splitlines()[-1].strip()
        raise InputError(f"its header describes no {architecture.model_type} of transformers: {reason}") from error
    _require_as_asked(config, entries)
    return config


def _counts(file: GgufFile, fields: ArchitectureFields) -> dict[str, Any]:
    if "token_embd.weight" not in file.tensors:
        raise InputError("it has no tensor token_embd.weight: copy or make it again")
    rows = file.shape("token_embd.weight")[0]
    if fields.count("vocab_size", rows) != rows:
        raise InputError(f"its header names another number of tokens than it has embeddings ({rows})")
    heads, width = fields.count("attention.head_count"), fields.count("embedding_length")
    head_dim, value_dim = (fields.count(f"attention.{name}_length", width // heads) for name in ("key", "value"))
    if head_dim != value_dim:
        raise InputError(f"its keys have {head_dim} dimensions and its values {value_dim}, which is not supported")
    layers = fields.count("block_count")
    if not any(name.startswith(f"blk.{layers - 1}.") for name in file.tensors):  # millions would be made before
        raise InputError(f"its header has {layers} layers, and the last has no tensor: copy or make it again")
    return {
        "_model_name_or_path": str(file.fields.get("general.name", file.path.stem)),
        "vocab_size": rows,
        "hidden_size": width,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.count("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,  # llama.cpp then uses the embeddings
    }


def _special_tokens(file: GgufFile) -> dict[str, Any]:
    """Ids of special tokens; None where the header has none, as transformers' defaults are those of another model."""
    ids = {entry: file.fields.get(f"tokenizer.ggml.{name}") for entry, name in _IDS.items()}
    return {entry: value for entry, value in ids.items() if value is not None or entry != "unk_token_id"}


def _gemma3(file: GgufFile, fields: ArchitectureFields, entries: dict[str, Any]) -> None:
    """Windowed layers have a base of their own and no scaling; the largest model scales by the width of a head."""
    windowed = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10_000.0)}
    entries["rope_parameters"] = {"full_attention": entries["rope_parameters"], "sliding_attention": windowed}
    is_largest = entries["num_hidden_layers"] == 62  # as llama.cpp knows it: the header does not say
    per_head = entries["hidden_size"] // entries["num_attention_heads"]
    entries["query_pre_attn_scalar"] = per_head if is_largest else entries["head_dim"]


def _phi3(file: GgufFile, fields: ArchitectureFields, entries: dict[str, Any]) -> None:
    """The length before scaling is an entry of its own, which would overrule that of the scaling."""
    rope = entries["rope_parameters"]
    entries["original_max_position_embeddings"] = rope.get(
        "original_max_position_embeddings", entries["max_position_embeddings"]
    )


def _stablelm(file: GgufFile, fields: ArchitectureFields, entries: dict[str, Any]) -> None:
    """Biases and the second norm of a layer are told by their tensors."""
    entries["use_qkv_bias"] = "blk.0.attn_q.bias" in file.tensors
    entries["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in file.tensors
    if fields.take("use_parallel_residual", entries["use_parallel_residual"]) != entries["use_parallel_residual"]:
        raise InputError("its header and its tensors disagree on use_parallel_residual: copy or make it again")


_SPECIFIC: dict[str, Callable[[GgufFile, ArchitectureFields, dict[str, Any]], None]] = {
    "gemma3": _gemma3,
    "phi3": _phi3,
    "stablelm": _stablelm,
}


def _require_as_asked(config: Any, entries: Mapping[str, Any]) -> None:
    """Refuse what a configuration has made something else of, such as a scaling that its architecture does not know."""
    for name, asked in entries.items():
        made = asked if name.startswith("_") else getattr(config, name, None)
        if not _holds(made, asked):
            raise InputError(f"transformers' {config.model_type} cannot have {name} {asked}")


def _holds(made: Any, asked: Any) -> bool:
    if isinstance(asked, dict):
        return isinstance(made, dict) and all(_holds(made.get(key), value) for key, value in asked.items())
    return bool(made == asked)
