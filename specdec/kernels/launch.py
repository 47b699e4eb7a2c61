"""How Triton kernels are launched here: dependent launch where the hardware has it.

With programmatic dependent launch a kernel starts while the one before it drains; it may touch what that one wrote only
after `wait()`. Every kernel of a chain waits, so each sees everything launched before it as finished.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on this device may be launched before the one in front has finished."""
    return device.type == 'cuda' and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments for a kernel that declares OVERLAP and calls wait() and release()."""
    return {'OVERLAP': True, 'launch_pdl': True} if overlaps(device) else {'OVERLAP': False}


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of the device; the interpreter has one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == 'cuda' else 1


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """What kernels launched before this one wrote may be read from here on."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def prefetch(rows, COUNT: tl.constexpr):
    """Ask for the first COUNT cache lines at each pointer of `rows` [n] (bf16): what no earlier kernel writes may come
    while that one still runs.
    """
    lines = rows[:, None] + (tl.arange(0, COUNT) * 64)[None, :]
    tl.inline_asm_elementwise(
        'prefetch.global.L2 [$1]; mov.u32 $0, 0;', '=r,l', [lines], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def release(OVERLAP: tl.constexpr):
    """The next kernel may start to launch."""
    if OVERLAP:
        gdc_launch_dependents()
