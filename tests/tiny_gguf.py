"""A GGUF file of a random Llama of one layer with a byte tokenizer, as llama.cpp would store it."""

from pathlib import Path

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
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*letters, "ab", *SPECIAL_TOKENS]
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
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([1] * (len(vocabulary) - 2) + [3, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(len(vocabulary) - 2)
    writer.add_eos_token_id(len(vocabulary) - 1)
    writer.add_chat_template(CHAT_TEMPLATE)
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
