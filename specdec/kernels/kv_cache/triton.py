"""Page writes on a GPU, a row per program."""

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import launch_options, release, wait


@triton.jit
def _write_kernel(
    k, v, k_pages, v_pages, slots, k_stride, v_stride, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    inside = e < size
    wait(OVERLAP)
    release(OVERLAP)
    place = tl.load(slots + row) * size + e
    tl.store(k_pages + place, tl.load(k + row * k_stride + e, mask=inside), mask=inside)
    tl.store(v_pages + place, tl.load(v + row * v_stride + e, mask=inside), mask=inside)


def kv_write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    size = k.shape[1] * k.shape[2]
    block = triton.next_power_of_2(size)
    _write_kernel[(k.shape[0],)](
        k, v, k_pages, v_pages, slots, k.stride(0), v.stride(0), size,
        BLOCK=block, num_warps=4, **launch_options(k.device),
    )  # fmt: skip
