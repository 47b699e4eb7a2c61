"""The convolution on a GPU: for decoding rows a program per request and block of channels; prompt chunks as in ref.py.

A program owns its channels of the slot's windows: it reads one set and writes the other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.causal_conv1d.ref import convolve_chunks
from specdec.kernels.launch import launch_options, release, wait
from specdec.kernels.state_rows import StateRows


@triton.jit
def _decode_kernel(
    x, weight, windows, out, slots, offsets, pending, parity, fresh, x_stride, out_stride, channels, height,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    kept: tl.constexpr = WIDTH - 1
    wait(OVERLAP)
    slot = tl.load(slots + request)
    first, last = tl.load(offsets + request), tl.load(offsets + request + 1)
    side = tl.load(parity + request)
    known = tl.load(fresh + request) == 0
    old = windows + ((slot * 2 + side) * height + tl.load(pending + request)) * channels + c
    new = windows + (slot * 2 + 1 - side) * height * channels + c
    for back in tl.static_range(kept):
        row_before = tl.load(old + back * channels, mask=inside, other=0.0)
        tl.store(new + back * channels, tl.where(known, row_before, 0.0), mask=inside)
    for row in range(first, last):
        i = row - first
        total = tl.zeros((BLOCK,), tl.float32)
        for j in tl.static_range(WIDTH):
            behind = i + j + tl.zeros((BLOCK,), tl.int32) < kept
            before = tl.load(old + (i + j) * channels, mask=inside & behind, other=0.0)
            before = tl.where(known, before, 0.0)
            mine = tl.load(x + (row + j - kept) * x_stride + c, mask=inside & (behind == 0), other=0.0)
            tap = tl.load(weight + c * WIDTH + j, mask=inside, other=0.0).to(tl.float32)
            total += tl.where(behind, before, mine).to(tl.float32) * tap
        tl.store(new + (kept + i) * channels, tl.load(x + row * x_stride + c, mask=inside, other=0.0), mask=inside)
        tl.store(out + row * out_stride + c, total * tl.sigmoid(total), mask=inside)
    release(OVERLAP)


def causal_conv1d(x: Tensor, weight: Tensor, windows: Tensor, rows: StateRows) -> Tensor:
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    convolve_chunks(x, weight, windows, rows, out)
    mine = rows.decodes()
    requests, channels = len(mine.slots), x.shape[1]
    if requests:
        block = min(256, triton.next_power_of_2(channels))
        _decode_kernel[(requests, triton.cdiv(channels, block))](
            x, weight, windows, out, mine.slots, mine.offsets, mine.pending, mine.parity, mine.fresh.view(torch.uint8),
            x.stride(0), out.stride(0), channels, windows.shape[2],
            WIDTH=weight.shape[1], BLOCK=block, num_warps=4, **launch_options(x.device),
        )  # fmt: skip
    return out
