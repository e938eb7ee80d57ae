"""GGUF files of small models of transformers, as llama.cpp's converter lays them out: names, order of rows, offsets."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.tiny_gguf import add_byte_tokenizer, add_field

# Modules of transformers and tensors of llama.cpp, which are documented with the format.
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_model_gguf(
    path: Path,
    network: torch.nn.Module,
    architecture: str,
    fields: Mapping[str, Any],
    *,
    tensors: Mapping[str, np.ndarray] | None = None,
    without: Collection[str] = (),
) -> Path:
    """Write weights and counts of a model, with further fields and tensors; a field that is None is left out."""
    import gguf

    config: Any = network.config
    prefix = f"{architecture}."
    counts = {
        f"{prefix}context_length": config.max_position_embeddings,
        f"{prefix}embedding_length": config.hidden_size,
        f"{prefix}block_count": config.num_hidden_layers,
        f"{prefix}feed_forward_length": config.intermediate_size,
        f"{prefix}attention.head_count": config.num_attention_heads,
        f"{prefix}attention.head_count_kv": config.num_key_value_heads,
    }
    writer = gguf.GGUFWriter(path, architecture)
    tokenizer = {name: value for name, value in fields.items() if name.startswith("tokenizer.")}
    add_byte_tokenizer(writer, tokenizer)
    for name, value in ({"general.name": "tiny"} | counts | {**fields}).items():
        if name not in tokenizer and value is not None:
            add_field(writer, name, value)
    for name, values in (_stored(network, architecture) | dict(tensors or {})).items():
        if name not in without:
            writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stored(network: torch.nn.Module, architecture: str) -> dict[str, np.ndarray]:
    config: Any = network.config
    names = _NAMES | (_GEMMA if architecture == "gemma3" else {})
    stored = {}
    for parameter, value in network.state_dict().items():
        if parameter == "lm_head.weight" and config.tie_word_embeddings:
            continue
        module, _, kind = parameter.rpartition(".")
        if module.startswith("model.layers."):
            _, _, layer, inner = module.split(".", 3)
            name = f"blk.{layer}.{names[inner]}.{kind}"
        else:
            name = f"{names[module]}.{kind}"
        values = value.float().numpy()
        if architecture == "llama" and ".attn_q." in name:
            values = _interleaved(values, config.num_attention_heads)
        if architecture == "llama" and ".attn_k." in name:
            values = _interleaved(values, config.num_key_value_heads)
        if architecture == "gemma3" and "norm" in name:
            values = values + 1
        stored[name] = values
    return stored


def _interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in the order 0, d/2, 1, d/2 + 1, … in which llama.cpp rotates them."""
    dim = len(values) // heads
    order = [
        head * dim + half * dim // 2 + pair for head in range(heads) for pair in range(dim // 2) for half in (0, 1)
    ]
    return values[order]
