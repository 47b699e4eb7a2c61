"""Causal attention of packed ragged rows over paged keys and values: prompt chunks and verify rows alike.

One operator from the projected rows to the attended ones: head norms, rotation, the write into the pages, attention.

What depends on the step but not on the layer (masks, tiles) is prepared once by `plan_paged_attention`, then used by
every layer.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec.kernels.dispatch import Implementations
from specdec.kernels.rotary import Rotary

_implementation = Implementations(__name__, cuda='triton')


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The packed rows of one step. Requests: prompt chunks first, at lengths the host knows, then decoding requests.

    row_offsets [B + 1]: request r's rows are row_offsets[r] .. row_offsets[r + 1]; contexts [B]: its committed tokens
    before its first row; page_table [B, P]: its pages; all int64. `chunk_rows`: rows of each prompt chunk.
    `tile_rows`: no decoding request has more rows (K + 1). `page_size`: tokens per page.
    """

    row_offsets: Tensor
    contexts: Tensor
    page_table: Tensor
    chunk_rows: tuple[int, ...]
    tile_rows: int
    page_size: int


def plan_paged_attention(layout: RowLayout, heads_per_group: int, windows: frozenset[int | None], dtype: Any) -> Any:
    """What `paged_attention` needs for every layer of this step; opaque, made for the layout's device.

    `heads_per_group`: query heads per key head. `windows`: the windows that layers will ask for.
    """
    device = layout.row_offsets.device.type
    return _implementation(device, 'plan_paged_attention')(layout, heads_per_group, windows, dtype)


def paged_attention(
    qkv: Tensor,
    norms: Tensor,
    eps: float,
    rotary: Rotary,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    plan: Any,
    window: int | None,
    scale: float,
) -> Tensor:
    """Write the rows' keys and values, then attend: row at position p sees entries 0 .. p of its own -> [T, q * hd].

    qkv [T, (q + 2 kv) * hd]: projected query, key, value heads; norms [q + kv, hd] and `rotary` as in kernels.rotary;
    k_pages, v_pages [pages, page, kv, hd]; slots [T]: entry of each row. With `window` W only entries p - W + 1 .. p.
    """
    attend = _implementation(qkv.device.type, 'paged_attention')
    return attend(qkv, norms, eps, rotary, k_pages, v_pages, slots, plan, window, scale)
