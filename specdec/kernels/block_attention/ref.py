"""Block attention in plain torch: gathered pages and block rows are laid side by side, a mask says who sees whom."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.block_attention import Rule
from specdec.kernels.paged_attention.ref import Gathered, grouped_attention, project_heads
from specdec.kernels.rotary import Rotary


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """`pages` [B, P]; `keys`: context entries kept; `masks[rule]`: [B, 1, b * heads_per_group, keys + b] or None."""

    pages: Tensor
    keys: int
    masks: dict[Rule, Tensor | None]
    gathered: Gathered


def plan_block_attention(
    contexts: Tensor,
    page_table: Tensor,
    page_size: int,
    block_rows: int,
    heads_per_group: int,
    rules: frozenset[Rule],
    dtype: torch.dtype,
) -> BlockPlan:
    lengths = contexts.tolist()
    keys = max(lengths)
    pages = page_table[:, : -(-keys // page_size)]
    uniform = min(lengths) == keys
    masks = {
        rule: None
        if uniform and rule[:2] == (False, None)
        else _mask(contexts, keys, block_rows, rule, heads_per_group, dtype)
        for rule in rules
    }
    return BlockPlan(pages, keys, masks, Gathered())


def _mask(contexts: Tensor, keys: int, block_rows: int, rule: Rule, heads_per_group: int, dtype: torch.dtype) -> Tensor:
    causal, window, anchored = rule
    start = contexts[:, None, None]
    row = torch.arange(block_rows, device=contexts.device)
    query = start + row[None, :, None]
    context = torch.arange(keys, device=contexts.device)[None, None].expand(contexts.shape[0], 1, keys)
    block = start + row[None, None]
    hidden_context = (context >= start).expand(-1, block_rows, -1)
    hidden_block = (block > query) if causal else torch.zeros_like(block > query)
    if window is not None and anchored:
        hidden_context = hidden_context | (context < start - window)
    elif window is not None:
        hidden_context = hidden_context | (query - context >= window)
        hidden_block = hidden_block | ((query - block).abs() >= window)
    hidden = torch.cat([hidden_context, hidden_block], -1)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float('-inf'))
    return mask.repeat_interleave(heads_per_group, 1)[:, None]


def block_attention(
    qkv: Tensor,
    norms: Tensor,
    eps: float,
    rotary: Rotary,
    k_pages: Tensor,
    v_pages: Tensor,
    plan: BlockPlan,
    rule: Rule,
    scale: float,
) -> Tensor:
    batch = plan.pages.shape[0]
    heads = project_heads(qkv, norms, eps, rotary, k_pages.shape[2])
    q, k, v = (x.view(batch, -1, *x.shape[1:]) for x in heads)
    keys = torch.cat([plan.gathered.pages(0, k_pages, plan.pages)[:, : plan.keys], k], 1)
    values = torch.cat([plan.gathered.pages(1, v_pages, plan.pages)[:, : plan.keys], v], 1)
    return grouped_attention(q, keys, values, plan.masks[rule], scale).flatten(2).flatten(0, 1)
