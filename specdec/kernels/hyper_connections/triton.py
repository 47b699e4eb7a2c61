"""Hyper-connections on a GPU: one product for the weights of all rows, then a program per row, twenty normalisations
in registers.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.hyper_connections import MixWeights
from specdec.kernels.launch import launch_options, release, wait


@triton.jit
def _collapse_kernel(
    streams, raw, base, scale, x, post, comb, size, width, norm_eps, eps, iterations,
    N: tl.constexpr, BLOCK: tl.constexpr, HEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n, d = tl.arange(0, N), tl.arange(0, BLOCK)
    wait(OVERLAP)
    source = streams + (row * N + n)[:, None] * size + d[None, :]
    squares = tl.zeros((N, BLOCK), tl.float32)
    for start in range(0, size, BLOCK):
        part = tl.load(source + start, mask=(start + d < size)[None, :], other=0.0).to(tl.float32)
        squares += part * part
    quotient = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / (N * size) + norm_eps)
    numbers = raw + row * width
    pre = tl.load(numbers + n) * quotient * tl.load(scale) + tl.load(base + n)
    pre = tl.sigmoid(pre) + eps
    for start in range(0, size, BLOCK):
        part = tl.load(source + start, mask=(start + d < size)[None, :], other=0.0).to(tl.float32)
        tl.store(x + row * size + start + d, tl.sum(pre[:, None] * part, 0), mask=start + d < size)
    if not HEAD:
        after = tl.load(numbers + N + n) * quotient * tl.load(scale + 1) + tl.load(base + N + n)
        tl.store(post + row * N + n, 2 * tl.sigmoid(after))
        place = 2 * N + n[:, None] * N + n[None, :]
        matrix = tl.load(numbers + place) * quotient * tl.load(scale + 2) + tl.load(base + place)
        matrix = tl.exp(matrix - tl.max(matrix, 1)[:, None])
        matrix = matrix / tl.sum(matrix, 1)[:, None] + eps
        matrix = matrix / (tl.sum(matrix, 0)[None, :] + eps)
        for _ in range(1, iterations):
            matrix = matrix / (tl.sum(matrix, 1)[:, None] + eps)
            matrix = matrix / (tl.sum(matrix, 0)[None, :] + eps)
        tl.store(comb + row * N * N + n[:, None] * N + n[None, :], matrix)
    release(OVERLAP)


def _collapse(streams: Tensor, weights: MixWeights, head: bool) -> tuple[Tensor, Tensor, Tensor]:
    streams = streams.contiguous()
    rows, n, size = streams.shape
    assert n == triton.next_power_of_2(n), 'residual streams come in powers of two'
    raw = F.linear(streams.flatten(1).float(), weights.fn)
    x = torch.empty(rows, size, dtype=streams.dtype, device=streams.device)
    post = torch.empty(rows, n, dtype=torch.float32, device=streams.device)
    comb = torch.empty(rows, n, n, dtype=torch.float32, device=streams.device)
    _collapse_kernel[(rows,)](
        streams, raw, weights.base, weights.scale, x, post, comb, size, raw.shape[1], weights.norm_eps, weights.eps,
        weights.iterations, N=n, BLOCK=min(1024, triton.next_power_of_2(size)), HEAD=head, num_warps=4,
        **launch_options(x.device),
    )  # fmt: skip
    return x, post, comb


def collapse(streams: Tensor, weights: MixWeights) -> tuple[Tensor, Tensor, Tensor]:
    return _collapse(streams, weights, head=False)


def collapse_head(streams: Tensor, weights: MixWeights) -> Tensor:
    return _collapse(streams, weights, head=True)[0]


@triton.jit
def _expand_kernel(
    y, streams, post, comb, out, size, N: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n, d = tl.arange(0, N), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < size
    wait(OVERLAP)
    release(OVERLAP)
    total = (
        tl.load(post + row * N + n)[:, None]
        * tl.load(y + row * size + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    )
    for j in range(N):
        old = tl.load(streams + (row * N + j) * size + d, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(comb + (row * N + j) * N + n)[:, None] * old[None, :]
    tl.store(out + (row * N + n)[:, None] * size + d[None, :], total, mask=inside[None, :])


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    y, streams = y.contiguous(), streams.contiguous()
    rows, n, size = streams.shape
    out = torch.empty_like(streams)
    block = min(1024, triton.next_power_of_2(size))
    _expand_kernel[(rows, triton.cdiv(size, block))](
        y, streams, post.contiguous(), comb.contiguous(), out, size, N=n, BLOCK=block, num_warps=4,
        **launch_options(out.device),
    )  # fmt: skip
    return out
