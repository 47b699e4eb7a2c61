"""The gates on a GPU: a head of a row per program, or a block of a row's columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import launch_options, release, wait


@triton.jit
def _gated_norm_kernel(
    x, gate, weight, out, gate_stride, heads, dim, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < dim
    scale = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    place = (row * heads + head) * dim + d
    wait(OVERLAP)
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_stride + head * dim + d, mask=inside, other=0.0).to(tl.float32)
    release(OVERLAP)
    low = x.dtype.element_ty
    normed = (values * tl.rsqrt(tl.sum(values * values) / dim + eps)).to(low).to(tl.float32)
    normed = (normed * scale).to(low).to(tl.float32)
    tl.store(out + place, normed * gates * tl.sigmoid(gates), mask=inside)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    out, dim = torch.empty_like(x), weight.shape[0]
    heads = x.shape[1] // dim
    _gated_norm_kernel[(x.shape[0], heads)](
        x, gate, weight, out, gate.stride(0), heads, dim, eps,
        BLOCK=triton.next_power_of_2(dim), num_warps=1, **launch_options(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _sigmoid_kernel(
    x, gate, residual, out, gate_stride, size,
    BLOCK: tl.constexpr, SINGLE: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < size
    wait(OVERLAP)
    values = tl.load(x + row * size + n, mask=inside, other=0.0).to(tl.float32)
    column = tl.zeros((BLOCK,), tl.int32) if SINGLE else n
    gates = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    values = values * tl.sigmoid(gates)
    if ADD:
        values += tl.load(residual + row * size + n, mask=inside, other=0.0).to(tl.float32)
    release(OVERLAP)
    tl.store(out + row * size + n, values, mask=inside)


def sigmoid_gate(x: Tensor, gate: Tensor, residual: Tensor | None = None) -> Tensor:
    x = x.contiguous()
    out, size = torch.empty_like(x), x.shape[1]
    block = min(1024, triton.next_power_of_2(size))
    _sigmoid_kernel[(x.shape[0], triton.cdiv(size, block))](
        x, gate, residual, out, gate.stride(0), size,
        BLOCK=block, SINGLE=gate.shape[1] == 1, ADD=residual is not None, num_warps=4, **launch_options(x.device),
    )  # fmt: skip
    return out
