"""A GGUF file of a random Llama of one layer with a byte tokenizer, as llama.cpp would store it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

DIM, HEADS, KV_HEADS, LAYERS, FEED_FORWARD = 32, 4, 2, 1, 64
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_gguf(path: Path, *, positions: int = 256, seed: int = 0) -> Path:
    """Write the file; another seed gives other weights."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(positions)
    writer.add_embedding_length(DIM)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(DIM // HEADS)
    vocabulary = add_byte_tokenizer(writer)
    writer.add_vocab_size(len(vocabulary))
    random = np.random.default_rng(seed)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, (random.standard_normal(shape) * 0.2).astype(np.float32))

    add("token_embd.weight", len(vocabulary), DIM)
    add("output.weight", len(vocabulary), DIM)
    add("output_norm.weight", DIM)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        kv_dim = DIM * KV_HEADS // HEADS
        add(f"{block}.attn_norm.weight", DIM)
        add(f"{block}.attn_q.weight", DIM, DIM)
        add(f"{block}.attn_k.weight", kv_dim, DIM)
        add(f"{block}.attn_v.weight", kv_dim, DIM)
        add(f"{block}.attn_output.weight", DIM, DIM)
        add(f"{block}.ffn_norm.weight", DIM)
        add(f"{block}.ffn_gate.weight", FEED_FORWARD, DIM)
        add(f"{block}.ffn_up.weight", FEED_FORWARD, DIM)
        add(f"{block}.ffn_down.weight", DIM, FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_byte_tokenizer(writer: Any, changes: Mapping[str, Any] | None = None) -> list[str]:
    """Add a tokenizer of bytes, one merge and two special tokens, with some fields changed; None leaves a field out."""
    from tokenizers import pre_tokenizers

    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", *SPECIAL_TOKENS]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [1] * (len(vocabulary) - 2) + [3, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": len(vocabulary) - 2,
        "tokenizer.ggml.eos_token_id": len(vocabulary) - 1,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    for name, value in (fields | dict(changes or {})).items():
        if value is not None:
            add_field(writer, name, value)
    return vocabulary


def add_field(writer: Any, name: str, value: Any) -> None:
    """Add a field of the header in the type of its value."""
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    (writer.add_array if isinstance(value, list) else kinds[type(value)])(name, value)
