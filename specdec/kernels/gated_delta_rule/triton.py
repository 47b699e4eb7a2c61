"""The gated delta rule on a GPU: for decoding rows a program per request, value head and split of its value channels.

A program owns its part of the state, reads and writes it once, and walks pending and new rows in between. Pending rows
are read from one of the slot's sets and this step's are written to the other, so splits of a head, which share keys and
gates, never race. Prompt chunks are products of matrices and run as in ref.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gated_delta_rule import DeltaGates, DeltaHeads, DeltaState
from specdec.kernels.gated_delta_rule.ref import run_chunks
from specdec.kernels.launch import launch_options, release, wait
from specdec.kernels.state_rows import StateRows

TILE = 32, 4  # value channels and warps of one program; compiled for sm_90 nothing of it spills


@triton.jit
def _update(state, key, value, g, beta):
    """One row: state [dk, BV], key [dk] of any length, value [BV]."""
    key = key * tl.rsqrt(tl.sum(key * key) + 1e-6)
    state = state * tl.exp(g)
    known = tl.sum(state * key[:, None], 0)
    return state + key[:, None] * ((value - known) * beta)[None, :]


@triton.jit
def _decode_kernel(
    qkv, gate_rows, a_log, dt_bias, state, inputs, gates, out, slots, offsets, pending, parity, fresh,
    qkv_stride, gate_stride, capacity, key_heads, value_heads, key_dim, value_dim, scale,
    KEY: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = value_heads // key_heads
    key_head = head // group
    keys = key_heads * key_dim
    width = keys + value_heads * value_dim
    d = tl.arange(0, KEY)
    e = split * VALUE + tl.arange(0, VALUE)
    in_d, in_e = d < key_dim, e < value_dim
    wait(OVERLAP)
    slot = tl.load(slots + request)
    side = tl.load(parity + request)
    count = tl.load(pending + request)
    known = tl.load(fresh + request) == 0
    place = state + ((slot * value_heads + head) * key_dim + d[:, None]) * value_dim + e[None, :]
    inside = in_d[:, None] & in_e[None, :]
    tile = tl.where(known, tl.load(place, mask=inside, other=0.0), 0.0)
    old = (slot * 2 + side) * capacity
    for i in range(count):
        row = inputs + (old + i) * width
        key = tl.load(row + key_head * key_dim + d, mask=in_d, other=0.0).to(tl.float32)
        value = tl.load(row + keys + head * value_dim + e, mask=in_e, other=0.0).to(tl.float32)
        pair = gates + (old + i) * 2 * value_heads + head
        tile = _update(tile, key, value, tl.load(pair), tl.load(pair + value_heads))
    tl.store(place, tile, mask=inside)
    if ROWS:
        new = (slot * 2 + 1 - side) * capacity
        rate = -tl.exp(tl.load(a_log + head))
        bias = tl.load(dt_bias + head)
        first, last = tl.load(offsets + request), tl.load(offsets + request + 1)
        for t in range(first, last):
            source = qkv + t * qkv_stride
            query = tl.load(source + key_head * key_dim + d, mask=in_d, other=0.0).to(tl.float32)
            raw_key = tl.load(source + keys + key_head * key_dim + d, mask=in_d, other=0.0)
            raw_value = tl.load(source + 2 * keys + head * value_dim + e, mask=in_e, other=0.0)
            beta = tl.sigmoid(tl.load(gate_rows + t * gate_stride + head).to(tl.float32))
            x = tl.load(gate_rows + t * gate_stride + value_heads + head).to(tl.float32) + bias
            g = rate * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
            tile = _update(tile, raw_key.to(tl.float32), raw_value.to(tl.float32), g, beta)
            query = query * (tl.rsqrt(tl.sum(query * query) + 1e-6) * scale)
            read = tl.sum(tile * query[:, None], 0)
            tl.store(out + (t * value_heads + head) * value_dim + e, read, mask=in_e)
            row = inputs + (new + t - first) * width
            tl.store(row + keys + head * value_dim + e, raw_value, mask=in_e)
            if split == 0:
                if head % group == 0:
                    tl.store(row + key_head * key_dim + d, raw_key, mask=in_d)
                pair = gates + (new + t - first) * 2 * value_heads + head
                tl.store(pair, g)
                tl.store(pair + value_heads, beta)
    release(OVERLAP)


def _launch(
    qkv: Tensor | None,
    source: DeltaGates | None,
    out: Tensor | None,
    cache: DeltaState,
    heads: DeltaHeads,
    rows: StateRows,
    tile: tuple[int, int],
) -> None:
    block = min(tile[0], triton.next_power_of_2(heads.value_dim))
    grid = (len(rows.slots), heads.value_heads, triton.cdiv(heads.value_dim, block))
    _decode_kernel[grid](
        qkv, None if source is None else source.rows, None if source is None else source.a_log,
        None if source is None else source.dt_bias, cache.state, cache.inputs, cache.gates, out,
        rows.slots, rows.offsets, rows.pending, rows.parity, rows.fresh.view(torch.uint8),
        0 if qkv is None else qkv.stride(0), 0 if source is None else source.rows.stride(0), cache.inputs.shape[2],
        heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim, heads.key_dim**-0.5,
        KEY=triton.next_power_of_2(heads.key_dim), VALUE=block, ROWS=qkv is not None,
        num_warps=tile[1], **launch_options(cache.state.device),
    )  # fmt: skip


def gated_delta_rule(
    qkv: Tensor,
    gates: DeltaGates,
    cache: DeltaState,
    heads: DeltaHeads,
    rows: StateRows,
    tile: tuple[int, int] = TILE,
) -> Tensor:
    """`tile`: value channels (a power of two) and warps of one program."""
    out = torch.zeros(qkv.shape[0], heads.values, dtype=qkv.dtype, device=qkv.device)
    if rows.chunk_rows:
        fold(cache, heads, rows.chunks())
    run_chunks(qkv, gates, cache, heads, rows, out)
    decodes = rows.decodes()
    if len(decodes.slots):
        _launch(qkv, gates, out, cache, heads, decodes, tile)
    return out


def fold(cache: DeltaState, heads: DeltaHeads, rows: StateRows) -> None:
    _launch(None, None, None, cache, heads, rows, TILE)
