"""RMS norm, a row per program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import launch_options, release, wait


@triton.jit
def _rms_norm_kernel(x, weight, out, size, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait(OVERLAP)
    values = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    release(OVERLAP)
    quotient = tl.rsqrt(tl.sum(values * values) / size + eps)
    tl.store(out + row + column, (values * quotient).to(out.dtype.element_ty).to(tl.float32) * scale, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    warps = min(8, max(1, block // 256))
    options = launch_options(x.device)
    _rms_norm_kernel[(x.numel() // size,)](x, weight, out, size, eps, BLOCK=block, num_warps=warps, **options)
    return out
