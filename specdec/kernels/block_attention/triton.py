"""Block attention on a GPU: the splits of paged attention, with the block's own rows as one split more."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from specdec.kernels.block_attention import Rule
from specdec.kernels.paged_attention.triton import attend_splits, split_items
from specdec.kernels.rotary import Rotary
from specdec.kernels.rotary.triton import prepare_heads


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """`items` as in paged attention, `row_offsets` [B + 1] = 0, b, 2 b, ..."""

    items: Tensor
    row_offsets: Tensor
    contexts: Tensor
    page_table: Tensor
    tile: int


def plan_block_attention(
    contexts: Tensor,
    page_table: Tensor,
    page_size: int,
    block_rows: int,
    heads_per_group: int,
    rules: frozenset[Rule],
    dtype: torch.dtype,
) -> BlockPlan:
    offsets = torch.arange(contexts.shape[0] + 1, device=contexts.device) * block_rows
    tile = max(16, triton.next_power_of_2(block_rows * heads_per_group))
    return BlockPlan(split_items(contexts, extra=1), offsets, contexts, page_table, tile)


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
    kv_heads, dim = k_pages.shape[2:]
    k, v = torch.empty(2, qkv.shape[0], kv_heads, dim, dtype=qkv.dtype, device=qkv.device)
    q = prepare_heads(qkv, norms, eps, rotary, k, v, None)
    out = torch.empty_like(q)
    attend_splits(
        q, (k_pages, v_pages), (k, v), out,
        plan.items, plan.row_offsets, plan.contexts, plan.page_table, plan.tile, rule, scale,
    )  # fmt: skip
    return out.view(q.shape[0], -1)
