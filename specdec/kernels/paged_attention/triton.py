"""Paged attention on a GPU: decoding rows by splits of the context, prompt chunks by tiles of their rows.

A context is split at fixed absolute positions, every split is summed on its own, and splits are merged in order; so a
row's bits depend neither on the other rows of its request nor on how the splits were spread over programs. Where there
are more splits than workspace, one program merges all splits of a request itself, with the same arithmetic.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import launch_options, num_processors, release, wait
from specdec.kernels.paged_attention import RowLayout
from specdec.kernels.rotary import Rotary
from specdec.kernels.rotary.triton import prepare_heads

NEAR_SPLIT, NEAR_SPLITS, FAR_SPLIT = 128, 16, 512  # the first 2048 positions in splits of 128, the rest of 512
MAX_ITEMS = 1024  # (request, split) pairs that have workspace
CHUNK_TILE = 64
LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class Plan:
    """`items` [n + 1] int32: splits before each decoding request; `chunk_tiles` [2, tiles] int32: request and first row
    of each tile of chunk rows, None without chunks. `tile`: rows times grouped heads, padded for the matrix unit.
    `contexts`: the layout's, without gaps.
    """

    layout: RowLayout
    contexts: Tensor
    num_chunks: int
    items: Tensor | None
    chunk_tiles: Tensor | None
    heads_per_group: int
    tile: int


def plan_paged_attention(
    layout: RowLayout, heads_per_group: int, windows: frozenset[int | None], dtype: torch.dtype
) -> Plan:
    num_chunks = len(layout.chunk_rows)
    offsets = layout.row_offsets[num_chunks:]
    items = None
    if offsets.shape[0] > 1:
        items = split_items(layout.contexts[num_chunks:] + offsets[1:] - offsets[:-1])
    chunk_tiles = None
    if num_chunks:
        tiles = [(r, start) for r, rows in enumerate(layout.chunk_rows) for start in range(0, rows, CHUNK_TILE)]
        chunk_tiles = torch.tensor(tiles, dtype=torch.int32).t().contiguous().to(offsets.device, non_blocking=True)
    tile = max(16, triton.next_power_of_2(layout.tile_rows * heads_per_group))
    return Plan(layout, layout.contexts.contiguous(), num_chunks, items, chunk_tiles, heads_per_group, tile)


def warps_for(head_dim: int) -> int:
    """Of a program; heads of 256 would spill three times as many registers with four of them as with eight."""
    return 4 if head_dim <= 128 else 8


def split_items(keys: Tensor, extra: int = 0) -> Tensor:
    """Number of paged keys of each request [n] -> items before each request [n + 1] int32.

    Normally a request has as many items as its keys have splits, and `extra`; beyond MAX_ITEMS in all, one each.
    """
    near = (keys.clamp(max=NEAR_SPLIT * NEAR_SPLITS) + NEAR_SPLIT - 1) // NEAR_SPLIT
    far = ((keys - NEAR_SPLIT * NEAR_SPLITS).clamp(min=0) + FAR_SPLIT - 1) // FAR_SPLIT
    splits = near + far + extra
    splits = torch.where(splits.sum() <= MAX_ITEMS, splits, 1)
    return torch.nn.functional.pad(splits.cumsum(0), (1, 0)).to(torch.int32)


def paged_attention(
    qkv: Tensor,
    norms: Tensor,
    eps: float,
    rotary: Rotary,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    plan: Plan,
    window: int | None,
    scale: float,
) -> Tensor:
    q = prepare_heads(qkv, norms, eps, rotary, k_pages.flatten(0, 1), v_pages.flatten(0, 1), slots)
    out = torch.empty_like(q)
    layout = plan.layout
    if plan.chunk_tiles is not None:
        _attend_chunks(q, k_pages, v_pages, out, plan, plan.chunk_tiles, window, scale)
    if plan.items is not None:
        attend_splits(
            q,
            (k_pages, v_pages),
            None,
            out,
            plan.items,
            layout.row_offsets[plan.num_chunks :],
            plan.contexts[plan.num_chunks :],
            layout.page_table[plan.num_chunks :],
            plan.tile,
            (True, window, False),
            scale,
        )
    return out.view(q.shape[0], -1)


# ------------------------------------------------------------------------------------------------ rows by splits
@triton.jit
def _split_start(split, NEAR: tl.constexpr, COUNT: tl.constexpr, FAR: tl.constexpr):
    return tl.where(split < COUNT, split * NEAR, NEAR * COUNT + (split - COUNT) * FAR)


@triton.jit
def _merge(top, mass, total, new_top, new_mass, new_total):
    """Two softmax states into one; merging into the empty state (top -inf) changes no bit of the new one."""
    best = tl.maximum(top, new_top)
    safe = tl.where(best == float('-inf'), 0.0, best)
    old, new = tl.exp2(top - safe), tl.exp2(new_top - safe)
    return best, mass * old + new_mass * new, total * old[:, None] + new_total * new[:, None]


@triton.jit
def _attend_keys(
    q, top, mass, total, k_rows, v_rows, inside, visible, scale, PRECISION: tl.constexpr
):  # fmt: skip
    """One tile of keys into a running softmax state; scores are kept in base 2."""
    k = tl.load(k_rows, mask=inside[:, None], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
    scores = tl.where(visible, scores, float('-inf'))
    best = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(best == float('-inf'), 0.0, best)
    weights = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(top - safe)
    v = tl.load(v_rows, mask=inside[:, None], other=0.0)
    total = tl.dot(weights.to(v.dtype), v, total * shrink[:, None], input_precision=PRECISION)
    return best, mass * shrink + tl.sum(weights, 1), total


@triton.jit
def _splits_kernel(
    q, k_pages, v_pages, k_block, v_block, items, row_offsets, contexts, page_table, partial, partial_state,
    num_requests, table_width, page_size, heads, kv_heads, programs, scale,
    REQUESTS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
    NEAR: tl.constexpr, COUNT: tl.constexpr, FAR: tl.constexpr, MAX_PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ANCHORED: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    lane = tl.arange(0, REQUESTS)
    m = tl.arange(0, TILE)
    d = tl.arange(0, DIM)
    n = tl.arange(0, KEYS)
    wait(OVERLAP)
    ends = tl.load(items + 1 + lane, mask=lane < num_requests, other=2147483647)
    num_items = tl.load(items + num_requests)
    release(OVERLAP)
    for item in range(tl.program_id(0), num_items, programs):
        request = tl.sum((ends <= item).to(tl.int32), 0)
        before, after = tl.load(items + request), tl.load(items + request + 1)
        first_row = tl.load(row_offsets + request)
        rows = tl.load(row_offsets + request + 1) - first_row
        context = tl.load(contexts + request).to(tl.int32)
        paged = context if BLOCK_ROWS > 0 else context + rows.to(tl.int32)
        far = tl.maximum(paged - NEAR * COUNT, 0)
        page_splits = (tl.minimum(paged, NEAR * COUNT) + NEAR - 1) // NEAR + (far + FAR - 1) // FAR
        splits = page_splits + (1 if BLOCK_ROWS > 0 else 0)
        first_split = item - before if after - before == splits else 0
        last_split = first_split + 1 if after - before == splits else splits
        table = page_table + request.to(tl.int64) * table_width
        row, head = m // GROUP, kv_head * GROUP + m % GROUP
        valid = row < rows
        position = context + row
        q_place = ((first_row + row) * heads + head).to(tl.int64) * DIM
        query = tl.load(q + q_place[:, None] + d[None, :], mask=valid[:, None], other=0.0)
        top = tl.full((TILE,), float('-inf'), tl.float32)
        mass = tl.zeros((TILE,), tl.float32)
        total = tl.zeros((TILE, DIM), tl.float32)
        for split in range(first_split, last_split):
            part_top = tl.full((TILE,), float('-inf'), tl.float32)
            part_mass = tl.zeros((TILE,), tl.float32)
            part = tl.zeros((TILE, DIM), tl.float32)
            start = _split_start(split, NEAR, COUNT, FAR)
            stop = tl.minimum(_split_start(split + 1, NEAR, COUNT, FAR), paged)
            if WINDOW > 0:  # keys before every row's window are skipped in whole tiles
                oldest = context - WINDOW if ANCHORED else context - WINDOW + 1
                start = tl.maximum(start, tl.maximum(oldest, 0) // KEYS * KEYS)
            if split < page_splits:
                for tile in range(start, stop, KEYS):
                    key = tile + n
                    inside = key < stop
                    page = tl.load(table + key // page_size, mask=inside, other=0)
                    entry = (page.to(tl.int64) * page_size + key % page_size) * kv_heads + kv_head
                    visible = valid[:, None] & inside[None, :]
                    if BLOCK_ROWS == 0:
                        visible = visible & (key[None, :] <= position[:, None])
                    if WINDOW > 0:
                        if ANCHORED:
                            visible = visible & (key[None, :] >= context - WINDOW)
                        else:
                            visible = visible & (position[:, None] - key[None, :] < WINDOW)
                    places = entry[:, None] * DIM + d[None, :]
                    part_top, part_mass, part = _attend_keys(
                        query, part_top, part_mass, part, k_pages + places, v_pages + places, inside, visible,
                        scale, PRECISION,
                    )  # fmt: skip
            elif BLOCK_ROWS > 0:
                for tile in range(0, BLOCK_ROWS, KEYS):
                    key = tile + n
                    inside = key < rows
                    entry = ((first_row + key) * kv_heads + kv_head).to(tl.int64)
                    visible = valid[:, None] & inside[None, :]
                    if CAUSAL:
                        visible = visible & (key[None, :] <= row[:, None])
                    if WINDOW > 0 and not ANCHORED:
                        apart = row[:, None] - key[None, :]
                        visible = visible & (apart < WINDOW) & (-apart < WINDOW)
                    places = entry[:, None] * DIM + d[None, :]
                    part_top, part_mass, part = _attend_keys(
                        query, part_top, part_mass, part, k_block + places, v_block + places, inside, visible,
                        scale, PRECISION,
                    )  # fmt: skip
            top, mass, total = _merge(top, mass, total, part_top, part_mass, part)
        # partial sums of a row's splits lie side by side: [row, head, item of the request]
        slot = (item * kv_heads + kv_head) * TILE + m.to(tl.int64)
        tl.store(partial + slot[:, None] * DIM + d[None, :], total, mask=valid[:, None])
        tl.store(partial_state + slot * 2, top, mask=valid)
        tl.store(partial_state + slot * 2 + 1, mass, mask=valid)


@triton.jit
def _combine_kernel(
    partial, partial_state, items, row_offsets, out, num_requests, heads, kv_heads,
    REQUESTS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    lane = tl.arange(0, REQUESTS)
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM)
    wait(OVERLAP)
    first = tl.load(row_offsets)
    row = first + tl.program_id(0)
    ends = tl.load(row_offsets + 1 + lane, mask=lane < num_requests, other=9223372036854775807)
    request = tl.sum((ends <= row).to(tl.int32), 0)
    release(OVERLAP)
    if request < num_requests:
        before, after = tl.load(items + request), tl.load(items + request + 1)
        in_tile = (row - tl.load(row_offsets + request)) * GROUP + g
        valid = g < GROUP
        top = tl.full((GROUP_PAD,), float('-inf'), tl.float32)
        mass = tl.zeros((GROUP_PAD,), tl.float32)
        total = tl.zeros((GROUP_PAD, DIM), tl.float32)
        for item in range(before, after):
            slot = (item * kv_heads + kv_head) * TILE + in_tile
            new_top = tl.load(partial_state + slot * 2, mask=valid, other=float('-inf'))
            new_mass = tl.load(partial_state + slot * 2 + 1, mask=valid, other=0.0)
            new_total = tl.load(partial + slot[:, None] * DIM + d[None, :], mask=valid[:, None], other=0.0)
            top, mass, total = _merge(top, mass, total, new_top, new_mass, new_total)
        total = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
        place = (row * heads + kv_head * GROUP + g).to(tl.int64) * DIM
        tl.store(out + place[:, None] + d[None, :], total, mask=valid[:, None])


def attend_splits(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    block: tuple[Tensor, Tensor] | None,
    out: Tensor,
    items: Tensor,
    row_offsets: Tensor,
    contexts: Tensor,
    page_table: Tensor,
    tile: int,
    rule: tuple[bool, int | None, bool],
    scale: float,
) -> None:
    """Attention of n requests' rows over their pages and, where `block` holds dense keys and values, their own rows.

    q, out [T, heads, hd]; row_offsets [n + 1] into them; rows beyond the last offset are left alone. `items` as from
    `split_items`, one more per request where there is a block. `rule` as in kernels.block_attention.
    """
    assert contexts.is_contiguous()
    assert page_table.stride(1) == 1
    k_pages, v_pages = pages
    k_block, v_block = block or (k_pages, v_pages)
    (rows, heads, dim), kv_heads, n = q.shape, k_pages.shape[2], contexts.shape[0]
    causal, window, anchored = rule
    device, options = q.device, launch_options(q.device)
    parts = min(MAX_ITEMS, n * (page_table.shape[1] * k_pages.shape[1] // NEAR_SPLIT + 2)) + n
    partial = torch.empty(parts * kv_heads * tile, dim, dtype=torch.float32, device=device)
    state = torch.empty(parts * kv_heads * tile, 2, dtype=torch.float32, device=device)
    programs = min(parts, max(1, 4 * num_processors(device) // kv_heads))
    common = {'REQUESTS': triton.next_power_of_2(n), 'TILE': tile, 'GROUP': heads // kv_heads, 'DIM': dim}
    _splits_kernel[(programs, kv_heads)](
        q, k_pages, v_pages, k_block, v_block, items, row_offsets, contexts, page_table, partial, state,
        n, page_table.stride(0), k_pages.shape[1], heads, kv_heads, programs, scale,
        KEYS=64, NEAR=NEAR_SPLIT, COUNT=NEAR_SPLITS, FAR=FAR_SPLIT, MAX_PARTS=parts,
        BLOCK_ROWS=0 if block is None else rows // n, CAUSAL=causal, WINDOW=window or 0, ANCHORED=anchored,
        PRECISION='ieee' if q.dtype == torch.float32 else 'tf32',
        num_warps=warps_for(dim), num_stages=2, **common, **options,
    )  # fmt: skip
    _combine_kernel[(rows, kv_heads)](
        partial, state, items, row_offsets, out, n, heads, kv_heads,
        GROUP_PAD=triton.next_power_of_2(heads // kv_heads), num_warps=2, **common, **options,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- prompt chunks
@triton.jit
def _chunks_kernel(
    q, k_pages, v_pages, out, tiles, num_tiles, row_offsets, contexts, page_table, table_width, page_size,
    heads, kv_heads, scale,
    TILE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    m = tl.arange(0, TILE)
    d = tl.arange(0, DIM)
    n = tl.arange(0, KEYS)
    wait(OVERLAP)
    request = tl.load(tiles + tl.program_id(0)).to(tl.int64)
    row = tl.load(tiles + num_tiles + tl.program_id(0)) + m
    first_row = tl.load(row_offsets + request)
    rows = (tl.load(row_offsets + request + 1) - first_row).to(tl.int32)
    context = tl.load(contexts + request).to(tl.int32)
    release(OVERLAP)
    valid = row < rows
    position = context + row
    place = ((first_row + row) * heads + head).to(tl.int64) * DIM
    query = tl.load(q + place[:, None] + d[None, :], mask=valid[:, None], other=0.0)
    top = tl.full((TILE,), float('-inf'), tl.float32)
    mass = tl.zeros((TILE,), tl.float32)
    total = tl.zeros((TILE, DIM), tl.float32)
    stop = tl.minimum(tl.max(position, 0) + 1, context + rows)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(tl.min(position, 0) - WINDOW + 1, 0) // KEYS * KEYS
    for tile in range(start, stop, KEYS):
        key = tile + n
        inside = key < stop
        page = tl.load(page_table + request * table_width + key // page_size, mask=inside, other=0).to(tl.int64)
        entry = (page * page_size + key % page_size) * kv_heads + head // GROUP
        visible = (key[None, :] <= position[:, None]) & inside[None, :]
        if WINDOW > 0:
            visible = visible & (position[:, None] - key[None, :] < WINDOW)
        places = entry[:, None] * DIM + d[None, :]
        top, mass, total = _attend_keys(
            query, top, mass, total, k_pages + places, v_pages + places, inside, visible, scale, PRECISION
        )
    total = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
    tl.store(out + place[:, None] + d[None, :], total, mask=valid[:, None])


def _attend_chunks(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    out: Tensor,
    plan: Plan,
    tiles: Tensor,
    window: int | None,
    scale: float,
) -> None:
    layout, kv_heads, (_, heads, dim) = plan.layout, k_pages.shape[2], q.shape
    table = layout.page_table
    _chunks_kernel[(tiles.shape[1], heads)](
        q, k_pages, v_pages, out, tiles, tiles.shape[1], layout.row_offsets, plan.contexts, table, table.stride(0),
        layout.page_size, heads, kv_heads, scale,
        TILE=CHUNK_TILE, GROUP=heads // kv_heads, DIM=dim, KEYS=64, WINDOW=window or 0,
        PRECISION='ieee' if q.dtype == torch.float32 else 'tf32', num_warps=warps_for(dim), num_stages=2,
        **launch_options(q.device),
    )  # fmt: skip
