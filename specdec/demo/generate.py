"""Plain batched decoding with the training modules: text in the target's own voice, for drafts to learn from.

Also makes the text that acceptance is measured on. Next: measure.py, which does.
"""

import torch
from torch import Tensor
from torch.nn import functional

from specdec.demo.machine import CapturedStep
from specdec.demo.networks import DecoderLayer, Target, rotary_angles

PREFILL_ROWS = 131_072  # rows per prefill forward, so that activations stay small beside the cache


@torch.inference_mode()
def continue_text(
    target: Target,
    prompts: Tensor,
    lengths: Tensor,
    num_tokens: int,
    temperatures: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Continue prompts [batch, width] int64, padded on the right to `lengths` [batch], by `num_tokens` >= 1 ids each.

    temperatures [batch]: 0 picks the most likely id. Returns [batch, num_tokens].
    """
    config, (batch, width) = target.config, prompts.shape
    capacity = -(-(width + num_tokens) // 8) * 8  # multiples of 8 keep the masked attention kernels usable
    shape = (config.num_layers, batch, config.num_kv_heads, capacity, config.head_dim)
    keys = torch.zeros(shape, device=prompts.device, dtype=target.embed_tokens.weight.dtype)
    values = torch.zeros_like(keys)
    piece = max(1, PREFILL_ROWS // width)
    pieces = [slice(first, first + piece) for first in range(0, batch, piece)]
    last = [_prefill(target, prompts[part], lengths[part], keys[:, part], values[:, part]) for part in pieces]
    logits = torch.cat(last)
    decode = CapturedStep(lambda ids, positions: (_decode(target, ids, positions, keys, values),), prompts.device)
    tokens = []
    for step in range(num_tokens):
        tokens.append(_pick(logits, temperatures, generator))
        if step + 1 < num_tokens:
            (logits,) = decode(tokens[-1], lengths + step)
    return torch.stack(tokens, 1)


def _prefill(target: Target, prompts: Tensor, lengths: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Fill the caches [layers, batch, kv_heads, capacity, head_dim]; -> logits of each prompt's last row."""
    width = prompts.shape[1]
    angles = rotary_angles(torch.arange(width, device=prompts.device)[None], target.config)
    x = target.embed_tokens(prompts)
    for index, layer in enumerate(target.layers):
        k, v = layer.self_attn.keys_values(layer.input_layernorm(x), angles)
        keys[index, :, :, :width], values[index, :, :, :width] = k, v
        x = layer(x, angles)
    rows = torch.arange(len(prompts), device=prompts.device)
    return target.logits(target.norm(x[rows, lengths - 1]))


def _decode(target: Target, tokens: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One row each: write K/V at `positions` [batch], attend up to them; -> logits [batch, vocab]."""
    angles = rotary_angles(positions[:, None], target.config)
    mask = (torch.arange(keys.shape[3], device=keys.device) <= positions[:, None])[:, None, None]
    x = target.embed_tokens(tokens)[:, None]
    for layer, layer_keys, layer_values in zip(target.layers, keys, values, strict=True):
        x = _decode_layer(layer, x, angles, positions, layer_keys, layer_values, mask)
    return target.logits(target.norm(x))[:, 0]


def _decode_layer(
    layer: DecoderLayer, x: Tensor, angles: tuple, positions: Tensor, keys: Tensor, values: Tensor, mask: Tensor
) -> Tensor:
    attention = layer.self_attn
    normed = layer.input_layernorm(x)
    rows = torch.arange(len(x), device=x.device)
    k, v = attention.keys_values(normed, angles)
    keys[rows, :, positions], values[rows, :, positions] = k[:, :, 0], v[:, :, 0]
    # With one row a request, the heads that share a key head are the rows of one attention: no K/V is repeated.
    queries = attention.queries(normed, angles).view(len(x), -1, attention.group, attention.head_dim)
    mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    x = x + attention.o_proj(mixed.reshape(len(x), 1, -1))
    return x + layer.mlp(layer.post_attention_layernorm(x))


def _pick(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """argmax of logits / temperature + Gumbel noise; of the logits alone where the temperature is 0."""
    logits = logits.float()
    exponential = torch.empty_like(logits).exponential_(generator=generator).clamp_min(1e-30)
    return (logits - temperatures[:, None] * exponential.log()).argmax(-1)
