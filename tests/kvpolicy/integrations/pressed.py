"""Models of transformers, and the entries that a press leaves in their caches."""

import torch
from transformers import AutoModelForCausalLM, DynamicCache


def load_network(folder):
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()


def pressed(network, press, tokens):
    """Keys and values of every layer after a prefill under a press."""
    cache = DynamicCache()
    with torch.no_grad(), press(network):
        network(tokens, past_key_values=cache)
    return [(layer.keys, layer.values) for layer in cache.layers]


def indices_of(whole, part):
    """Indices of the entries of each head that are among those of the whole, in order."""
    same = (whole[:, None] - part[:, :, None]).abs().amax(dim=-1) < 1e-4  # head, kept, whole
    assert (same.sum(dim=2) == 1).all()
    return same.int().argmax(dim=2).sort(dim=1).values
