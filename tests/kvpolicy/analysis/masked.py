"""Eager attention that hides evicted entries, head by head: what compacted caches are compared with."""

import torch

from kvpolicy.methods.ranking import NOT_KEPT


def masked_forward(network, tokens, kept, spec, num_context):
    """Run the whole sequence at once, where tokens after the context do not see what their head evicted."""
    size = tokens.shape[0]
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    hooks = []
    for index, layer in enumerate(network.model.layers):
        visible = causal.repeat(spec.num_query_heads, 1, 1)
        for query_head in range(spec.num_query_heads):
            head = index * spec.num_kv_heads + query_head // spec.group_size
            evicted = sorted(set(range(num_context)) - set(kept[head].tolist()) - {NOT_KEPT})
            visible[query_head, num_context:, evicted] = False
        mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)[None]

        def put_mask(module, args, kwargs, mask=mask):
            return args, {**kwargs, "attention_mask": mask}

        hooks.append(layer.self_attn.register_forward_pre_hook(put_mask, with_kwargs=True))
    try:
        with torch.no_grad():
            return network(input_ids=tokens[None], use_cache=False, output_attentions=True)
    finally:
        for hook in hooks:
            hook.remove()


def masked_importance(network, tokens, kept, spec, num_context):
    """What every context entry receives from the later tokens then."""
    weights = masked_forward(network, tokens, kept, spec, num_context).attentions
    by_layer = [of_layer[0, :, num_context:, :num_context] for of_layer in weights]
    grouped = torch.stack(by_layer).view(spec.num_heads, spec.group_size, -1, num_context)
    return grouped.amax(dim=1).sum(dim=1)
