"""Routed experts on a GPU: for up to 64 rows one program per expert and output tile, which finds its own rows.

No sorting, no counting on the host: an expert that nobody chose costs an empty program. Every (row, choice) pair has
its own sum, and a row's k terms are added in the order of its choices, so its bits depend on itself alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import launch_options, release, wait
from specdec.kernels.moe import Fp4Weight, Matrices, ref
from specdec.kernels.moe.ref import route_sqrt_softplus, route_top_k

__all__ = ['expert_mlps', 'route_sqrt_softplus', 'route_top_k']

MAX_ROWS = 64


@triton.jit
def _weights(
    weight, scales, row, column, inputs, in_n, in_k, dtype: tl.constexpr, PACKED: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """A tile of rows [BN] and BK columns from `column` on; `in_n`, `in_k`: which of them there are."""
    k = column + tl.arange(0, BK)
    if not PACKED:
        place = row[:, None] * inputs + k[None, :]
        return tl.load(weight + place, mask=in_n[:, None] & in_k[None, :], other=0.0)
    half = column // 2 + tl.arange(0, BK // 2)
    inside = in_n[:, None] & (half < inputs // 2)[None, :]
    pairs = tl.load(weight + row[:, None] * (inputs // 2) + half[None, :], mask=inside, other=0).to(tl.int32)
    nibbles = tl.interleave(pairs & 15, pairs >> 4)
    exponent, digit = (nibbles >> 1) & 3, nibbles & 1
    doubled = tl.where(exponent == 0, digit, (2 + digit) << tl.maximum(exponent - 1, 0)).to(tl.float32)
    signed = tl.where(nibbles >= 8, -0.5, 0.5) * doubled
    group = tl.load(
        scales + row[:, None] * (inputs // 32) + k[None, :] // 32, mask=in_n[:, None] & in_k[None, :], other=0
    )
    return (signed * (group.to(tl.int32) << 23).to(tl.float32, bitcast=True)).to(dtype)


@triton.jit
def _experts_kernel(
    x, weight, scales, experts, out, pairs, inputs, outputs, share, limit,
    PAIRS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr,
    LIMITED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    lane, m = tl.arange(0, PAIRS), tl.arange(0, BM)
    in_n = n < outputs
    rows_of_expert = outputs * 2 if GATED else outputs
    gate_row = expert.to(tl.int64) * rows_of_expert + n
    dtype: tl.constexpr = x.dtype.element_ty
    wait(OVERLAP)
    mine = (tl.load(experts + lane, mask=lane < pairs, other=-1) == expert).to(tl.int32)
    count = tl.sum(mine, 0)
    rank = tl.cumsum(mine, 0) - 1
    release(OVERLAP)
    for first in range(0, count, BM):
        wanted = (rank[None, :] == (first + m)[:, None]) & (mine[None, :] > 0)
        pair = tl.sum(tl.where(wanted, lane[None, :], 0), 1)
        used = first + m < count
        source = x + (pair // share)[:, None].to(tl.int64) * inputs
        total = tl.zeros((BM, BN), tl.float32)
        total_up = tl.zeros((BM, BN), tl.float32)
        for start in range(0, inputs, BK):
            in_k = start + k < inputs
            rows = tl.load(source + (start + k)[None, :], mask=used[:, None] & in_k[None, :], other=0.0)
            w = _weights(weight, scales, gate_row, start, inputs, in_n, in_k, dtype, PACKED, BK)
            total = tl.dot(rows, tl.trans(w), total, input_precision=PRECISION)
            if GATED:
                up = _weights(weight, scales, gate_row + outputs, start, inputs, in_n, in_k, dtype, PACKED, BK)
                total_up = tl.dot(rows, tl.trans(up), total_up, input_precision=PRECISION)
        if LIMITED:
            total = tl.minimum(total, limit)
            total_up = tl.minimum(tl.maximum(total_up, -limit), limit)
        if GATED:
            total = total * tl.sigmoid(total) * total_up
        tl.store(out + pair[:, None].to(tl.int64) * outputs + n[None, :], total, mask=used[:, None] & in_n[None, :])


def _experts(x: Tensor, weight: Matrices, experts: Tensor, share: int, gated: bool, limit: float | None) -> Tensor:
    """One product per (row, choice) pair -> [pairs, outputs] in x's dtype; pair p reads row p // share of x."""
    pairs, inputs = experts.numel(), x.shape[1]
    packed = isinstance(weight, Fp4Weight)
    stored, scales = (weight.values, weight.scales) if packed else (weight, weight)
    outputs = stored.shape[1] // 2 if gated else stored.shape[1]
    out = torch.empty(pairs, outputs, dtype=x.dtype, device=x.device)
    _experts_kernel[(triton.cdiv(outputs, 32), stored.shape[0])](
        x, stored, scales, experts, out, pairs, inputs, outputs, share, 0.0 if limit is None else float(limit),
        PAIRS=triton.next_power_of_2(pairs), BM=16, BN=32, BK=128, GATED=gated, LIMITED=limit is not None,
        PACKED=packed, PRECISION='ieee' if x.dtype == torch.float32 else 'tf32', num_warps=4, num_stages=3,
        **launch_options(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _sum_kernel(terms, weights, out, size, CHOICES: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    wait(OVERLAP)
    release(OVERLAP)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(CHOICES):
        pair = row * CHOICES + j
        term = tl.load(terms + pair * size + column, mask=inside, other=0.0).to(tl.float32)
        total += term * tl.load(weights + pair)
    tl.store(out + row * size + column, total, mask=inside)


def expert_mlps(
    x: Tensor, gate_up: Matrices, down: Matrices, weights: Tensor, experts: Tensor, limit: float | None = None
) -> Tensor:
    rows, size = x.shape
    if rows > MAX_ROWS:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return in_portions(x, gate_up, down, weights, experts, limit)
        return ref.expert_mlps(x, gate_up, down, weights, experts, limit)
    choices = experts.shape[1]
    experts, weights = experts.contiguous(), weights.contiguous()
    inner = _experts(x.contiguous(), gate_up, experts, choices, True, limit)
    terms = _experts(inner, down, experts, 1, False, None)
    out = torch.empty_like(x)
    block = min(1024, triton.next_power_of_2(size))
    _sum_kernel[(rows, triton.cdiv(size, block))](
        terms, weights, out, size, CHOICES=choices, BLOCK=block, num_warps=4, **launch_options(x.device)
    )
    return out


def in_portions(
    x: Tensor, gate_up: Matrices, down: Matrices, weights: Tensor, experts: Tensor, limit: float | None
) -> Tensor:
    """Many rows without asking which experts they chose, as a graph needs it: weights are read once per portion."""
    portions = zip(x.split(MAX_ROWS), weights.split(MAX_ROWS), experts.split(MAX_ROWS))
    return torch.cat([expert_mlps(rows, gate_up, down, w, e, limit) for rows, w, e in portions])
