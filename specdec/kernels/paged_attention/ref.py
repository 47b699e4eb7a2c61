"""Paged attention in plain torch: pages are gathered, requests padded to a tile, and torch's attention does the rest.

A step becomes groups of requests with tiles of equal height: each prompt chunk its own, decoding requests one together.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.kv_cache.ref import kv_write
from specdec.kernels.paged_attention import RowLayout
from specdec.kernels.rotary import Rotary
from specdec.kernels.rotary.ref import head_norm_rotary


@dataclass(frozen=True, slots=True)
class Group:
    """Requests attended together. `pages` [n, P]; `keys`: the entries kept of the gathered P * page.

    `tile` [n, M]: packed row of each tile row, None if the packed rows are the tile already; `scatter`: for each packed
    row of the group its flat tile row. `masks[window]`: [n, 1, M * heads_per_group, keys] added to the scores, or None.
    `gathered`: memory for keys and for values, the same for every layer.
    """

    rows: slice
    height: int
    pages: Tensor
    keys: int
    tile: Tensor | None
    scatter: Tensor | None
    masks: dict[int | None, Tensor | None]
    gathered: 'Gathered'


class Gathered:
    """Where pages are laid side by side. Fresh memory for every layer would be touched for the first time every time,
    which costs more than the copy.
    """

    def __init__(self) -> None:
        self._memory: list[Tensor | None] = [None, None]

    def pages(self, which: int, pages: Tensor, table: Tensor) -> Tensor:
        """pages [N, page, heads, hd], table [n, P] -> [n, P * page, heads, hd]; `which` 0 for keys, 1 for values."""
        memory = self._memory[which]
        if memory is None:
            memory = self._memory[which] = pages.new_empty(table.numel(), *pages.shape[1:])
        torch.index_select(pages, 0, table.flatten(), out=memory)
        return memory.view(table.shape[0], -1, *pages.shape[2:])


def plan_paged_attention(
    layout: RowLayout, heads_per_group: int, windows: frozenset[int | None], dtype: torch.dtype
) -> list[Group]:
    offsets = layout.row_offsets.tolist()
    contexts = layout.contexts.tolist()
    groups = []
    num_chunks = len(layout.chunk_rows)
    for r in range(num_chunks):
        groups.append(_group(layout, offsets, contexts, r, r + 1, heads_per_group, windows, dtype))
    if num_chunks < len(contexts):
        groups.append(_group(layout, offsets, contexts, num_chunks, len(contexts), heads_per_group, windows, dtype))
    return groups


def _group(
    layout: RowLayout,
    offsets: list[int],
    contexts: list[int],
    first: int,
    last: int,
    heads_per_group: int,
    windows: frozenset[int | None],
    dtype: torch.dtype,
) -> Group:
    counts = [offsets[r + 1] - offsets[r] for r in range(first, last)]
    height = max(counts)
    keys = max(contexts[r] + n for r, n in zip(range(first, last), counts))
    pages = layout.page_table[first:last, : -(-keys // layout.page_size)]
    device = pages.device
    tile = scatter = None
    if min(counts) < height:
        starts = torch.tensor(offsets[first:last], device=device)[:, None]
        rows = torch.tensor(counts, device=device)[:, None]
        step = torch.arange(height, device=device)[None]
        tile = (starts + step.minimum(rows - 1)) - offsets[first]
        scatter = (step < rows).flatten().nonzero().flatten()
    starts = layout.contexts[first:last, None, None]
    positions = starts + torch.arange(height, device=device)[None, :, None]
    entries = torch.arange(keys, device=device)
    masks = {w: _mask(positions, entries, w, heads_per_group, dtype) for w in windows}
    return Group(slice(offsets[first], offsets[last]), height, pages, keys, tile, scatter, masks, Gathered())


def _mask(
    positions: Tensor, entries: Tensor, window: int | None, heads_per_group: int, dtype: torch.dtype
) -> Tensor | None:
    hidden = entries > positions
    if window is not None:
        hidden = hidden | (positions - entries >= window)
    if positions.shape[0] == 1 and positions.shape[1] == 1 and not hidden.any():
        return None
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float('-inf'))
    return mask.repeat_interleave(heads_per_group, 1)[:, None]


def paged_attention(
    qkv: Tensor,
    norms: Tensor,
    eps: float,
    rotary: Rotary,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    plan: list[Group],
    window: int | None,
    scale: float,
) -> Tensor:
    q, k, v = project_heads(qkv, norms, eps, rotary, k_pages.shape[2])
    kv_write(k, v, k_pages, v_pages, slots)
    parts = [_attend(q[group.rows], k_pages, v_pages, group, window, scale) for group in plan]
    if plan[-1].rows.stop < q.shape[0]:
        parts.append(torch.zeros_like(q[plan[-1].rows.stop :]))  # padding rows
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


def project_heads(
    qkv: Tensor, norms: Tensor, eps: float, rotary: Rotary, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [T, (q + 2 kv) * hd] -> normed and rotated q [T, q, hd] and k [T, kv, hd], and v [T, kv, hd]."""
    heads = qkv.view(qkv.shape[0], -1, norms.shape[1])
    turned = norms.shape[0]
    qk = head_norm_rotary(heads[:, :turned], norms, eps, rotary)
    return qk[:, : turned - kv_heads], qk[:, turned - kv_heads :], heads[:, turned:]


def _attend(q: Tensor, k_pages: Tensor, v_pages: Tensor, group: Group, window: int | None, scale: float) -> Tensor:
    n = group.pages.shape[0]
    rows = q if group.tile is None else q[group.tile.flatten()]
    out = grouped_attention(
        rows.view(n, group.height, *q.shape[1:]),
        group.gathered.pages(0, k_pages, group.pages)[:, : group.keys],
        group.gathered.pages(1, v_pages, group.pages)[:, : group.keys],
        group.masks[window],
        scale,
    ).reshape(rows.shape)
    return out if group.scatter is None else out[group.scatter]


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q [n, M, heads, hd], k, v [n, L, kv_heads, hd], mask broadcast to [n, 1, M * group, L] -> [n, M, heads, hd].

    Query heads that share a key head become rows of one matrix, so that keys are never repeated.
    """
    n, height, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    q = q.view(n, height, kv_heads, heads // kv_heads, head_dim).transpose(1, 2).reshape(n, kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    return (
        out.view(n, kv_heads, height, heads // kv_heads, head_dim).transpose(1, 2).reshape(n, height, heads, head_dim)
    )
