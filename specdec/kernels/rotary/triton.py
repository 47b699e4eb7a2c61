"""Head norm and rotation on a GPU, a head of a row per program; keys and values go to their places in the same pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import launch_options, release, wait
from specdec.kernels.rotary import Rotary


@triton.jit
def _heads_kernel(
    x, norms, cos, sin, q, k, v, slots, row_stride, rotary_stride, eps, num_q, num_k,
    DIM: tl.constexpr, HAS_SLOTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, DIM)
    turned = (d + DIM // 2) % DIM
    wait(OVERLAP)
    slot = tl.load(slots + row) if HAS_SLOTS else row
    source = x + row * row_stride + head * DIM
    values = tl.load(source + d).to(tl.float32)
    release(OVERLAP)
    if head < num_q + num_k:
        partner = tl.load(source + turned).to(tl.float32)
        quotient = tl.rsqrt(tl.sum(values * values) / DIM + eps)
        weight = tl.load(norms + head * DIM + d).to(tl.float32)
        partner_weight = tl.load(norms + head * DIM + turned).to(tl.float32)
        low = x.dtype.element_ty
        values = ((values * quotient).to(low).to(tl.float32) * weight).to(low).to(tl.float32)
        partner = ((partner * quotient).to(low).to(tl.float32) * partner_weight).to(low).to(tl.float32)
        angle = row * rotary_stride + d
        values = values * tl.load(cos + angle) + partner * tl.load(sin + angle)
        if head < num_q:
            tl.store(q + (row * num_q + head) * DIM + d, values)
        else:
            tl.store(k + (slot * num_k + head - num_q) * DIM + d, values)
    else:
        tl.store(v + (slot * num_k + head - num_q - num_k) * DIM + d, values)


def prepare_heads(
    qkv: Tensor, norms: Tensor, eps: float, rotary: Rotary, k: Tensor, v: Tensor, slots: Tensor | None
) -> Tensor:
    """Norm and rotate the query heads -> q [T, q, hd]; write keys (normed, rotated) and values to rows of k, v.

    qkv [T, (q + 2 kv) * hd]; k, v [entries, kv, hd]; row t goes to entry slots[t], or t without slots.
    """
    rows, dim, num_k = qkv.shape[0], norms.shape[1], k.shape[1]
    num_q = norms.shape[0] - num_k
    q = torch.empty(rows, num_q, dim, dtype=qkv.dtype, device=qkv.device)
    cos, sin = rotary
    _heads_kernel[(rows, num_q + 2 * num_k)](
        qkv, norms, cos, sin, q, k, v, slots, qkv.stride(0), cos.stride(0), eps, num_q, num_k,
        DIM=dim, HAS_SLOTS=slots is not None, num_warps=1, **launch_options(qkv.device),
    )  # fmt: skip
    return q


def head_norm_rotary(x: Tensor, weight: Tensor, eps: float, rotary: Rotary) -> Tensor:
    rows, heads, dim = x.shape
    weight = weight.expand(heads, dim).contiguous()
    out = torch.empty(rows, heads, dim, dtype=x.dtype, device=x.device)
    cos, sin = rotary
    assert x.stride(1) == dim, 'heads lie side by side'
    _heads_kernel[(rows, heads)](
        x, weight, cos, sin, out, out, out, None, x.stride(0), cos.stride(0), eps, heads, 0,
        DIM=dim, HAS_SLOTS=False, num_warps=1, **launch_options(x.device),
    )  # fmt: skip
    return out
