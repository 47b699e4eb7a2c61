"""Products of up to 64 rows, bound by reading the weight once; more rows go to cuBLAS.

One program owns BN outputs of every row and walks all of K, so that no sum is split and a row's bits do not depend on
how many rows share the step: BN and BK are constants of the weight's shape, only the row tile BM follows the rows. What
comes behind a product (bias, gate, residual) happens in its registers. The norm in front is a kernel of its own: inside
the loop it would put a barrier between the loads and the matrix unit.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import launch_options, prefetch, release, wait
from specdec.kernels.norm.triton import rms_norm

MAX_ROWS = 64
SMALL_OUTPUTS = 16384  # products this small spend a good part of their time on starting up


def tile_of(outputs: int, inputs: int, gated: bool) -> tuple[int, int, int, int]:
    """(BN, BK, warps, stages) for a weight [outputs, inputs]; measured on an H200 (benchmark/bench_kernels.py)."""
    if gated:
        return 32, 128, 4, 4
    if outputs > 65536:
        return 128, 128, 4, 3
    if outputs > SMALL_OUTPUTS:
        return 64, 128, 4, 3
    return 32, 128, 4, 5


@triton.jit
def _rows_kernel(
    x, weight, bias, residual, out, rows, outputs, inputs,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, PREFETCH: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    in_n, in_m = n < outputs, m < rows
    w_rows = weight + n[:, None].to(tl.int64) * inputs + k[None, :]
    up_rows = w_rows + outputs.to(tl.int64) * inputs
    x_rows = x + m[:, None] * inputs + k[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    total_up = tl.zeros((BM, BN), tl.float32)
    if OVERLAP and PREFETCH > 0:
        prefetch(weight + tl.minimum(n, outputs - 1).to(tl.int64) * inputs, PREFETCH)
    wait(OVERLAP)
    for start in range(0, inputs, BK):
        in_k = (k < inputs - start) | EVEN
        rows_k = tl.load(x_rows, mask=in_m[:, None] & in_k[None, :], other=0.0)
        w = tl.load(w_rows, mask=in_n[:, None] & in_k[None, :], other=0.0, eviction_policy='evict_first')
        total = tl.dot(rows_k, tl.trans(w), total, input_precision=PRECISION)
        if GATED:
            up = tl.load(up_rows, mask=in_n[:, None] & in_k[None, :], other=0.0, eviction_policy='evict_first')
            total_up = tl.dot(rows_k, tl.trans(up), total_up, input_precision=PRECISION)
            up_rows += BK
        w_rows += BK
        x_rows += BK
    release(OVERLAP)
    if GATED:
        total = total * tl.sigmoid(total) * total_up
    if BIAS:
        total += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    place = m[:, None].to(tl.int64) * outputs + n[None, :]
    inside = in_m[:, None] & in_n[None, :]
    if ADD:
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total, mask=inside)


def _rows(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    dtype: torch.dtype | None = None,
    tile: tuple[int, int, int, int] | None = None,
) -> Tensor:
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(rows, outputs, dtype=dtype or x.dtype, device=x.device)
    block_n, block_k, warps, stages = tile or tile_of(outputs, inputs, gated)
    height = max(16, triton.next_power_of_2(rows))
    _rows_kernel[(triton.cdiv(outputs, block_n),)](
        x.contiguous(), weight, bias, residual, out, rows, outputs, inputs,
        BM=height, BN=block_n, BK=block_k, EVEN=inputs % block_k == 0, GATED=gated,
        BIAS=bias is not None, ADD=residual is not None,
        PREFETCH=16 if outputs <= SMALL_OUTPUTS and inputs >= 1024 and x.dtype == torch.bfloat16 and not gated else 0,
        PRECISION='ieee' if x.dtype == torch.float32 else 'tf32',
        num_warps=warps, num_stages=stages if height < 64 else min(stages, 4), **launch_options(x.device),
    )  # fmt: skip
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] > MAX_ROWS:
        return F.linear(x, weight, bias)
    return _rows(rows, weight, bias=bias).view(*x.shape[:-1], -1)


def head_logits(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] > MAX_ROWS:
        if weight.dtype == torch.float32:
            return F.linear(x, weight)
        return torch.mm(rows, weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], -1)
    return _rows(rows, weight, dtype=torch.float32).view(*x.shape[:-1], -1)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    if x.shape[0] > MAX_ROWS:
        return torch.addmm(residual if bias is None else residual + bias, x, weight.t())
    return _rows(x, weight, bias=bias, residual=residual)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(rms_norm(x, norm, eps), weight, bias)


def norm_swiglu(x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
    normed = rms_norm(x, norm, eps)
    return swiglu(F.linear(normed, gate_up)) if x.shape[0] > MAX_ROWS else _rows(normed, gate_up, gated=True)


@triton.jit
def _swiglu_kernel(gate_up, out, width, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    wait(OVERLAP)
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    release(OVERLAP)
    tl.store(out + row * width + column, gate * tl.sigmoid(gate) * up, mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of rows [T, 2 I] = (gate, up) -> [T, I]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(2048, triton.next_power_of_2(width))
    grid = (rows, triton.cdiv(width, block))
    _swiglu_kernel[grid](gate_up, out, width, BLOCK=block, num_warps=4, **launch_options(gate_up.device))
    return out
