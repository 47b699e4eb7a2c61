"""Sink attention on a GPU: a row and some of its heads per program, keys fetched from where they lie.

One latent row serves all heads, so the heads of a program are the rows of its products. Nothing is gathered into
memory, and a row has the same blocks whoever shares the step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import launch_options, release, wait
from specdec.kernels.ring import Sources
from specdec.kernels.sink_attention import Compressed


@triton.jit
def _block(q, keys, seen, out, top, total, scale, PRECISION: tl.constexpr):
    """One more block of keys [BK, D] into the running softmax of heads [BH, D]."""
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
    scores = tl.where(seen[None, :], scores, float('-inf'))
    higher = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp(top - higher)
    weights = tl.exp(scores - higher[:, None])
    out = out * shrink[:, None] + tl.dot(weights.to(keys.dtype), keys, input_precision=PRECISION)
    return out, higher, total * shrink + tl.sum(weights, 1)


@triton.jit
def _attend_kernel(
    q, fresh, ring, sources, places, from_ring, visible, pages, flat, rows, counts, sinks, out,
    heads, size, width, entries, scale,
    BH: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, COMPRESSED: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d, k = tl.arange(0, BD), tl.arange(0, BK)
    in_h, in_d = h < heads, d < size
    wait(OVERLAP)
    place = (row * heads + h)[:, None] * size + d[None, :]
    query = tl.load(q + place, mask=in_h[:, None] & in_d[None, :], other=0.0)
    top = tl.load(sinks + h, mask=in_h, other=0.0)
    total = tl.full((BH,), 1.0, tl.float32)  # the sink itself, which gives nothing
    sums = tl.zeros((BH, BD), tl.float32)
    for start in range(0, width, BK):
        column = row * width + start + k
        seen = (start + k < width) & (tl.load(visible + column, mask=start + k < width, other=0) != 0)
        old = tl.load(from_ring + column, mask=seen, other=0) != 0
        there = tl.load(places + column, mask=seen, other=0)
        here = tl.load(sources + column, mask=seen, other=0)
        kept = tl.load(ring + there[:, None] * size + d[None, :], mask=(seen & old)[:, None] & in_d[None, :], other=0.0)
        new = tl.load(fresh + here[:, None] * size + d[None, :], mask=(seen & ~old)[:, None] & in_d[None, :], other=0.0)
        keys = tl.where(old[:, None], kept, new)
        sums, top, total = _block(query, keys, seen, sums, top, total, scale, PRECISION)
    if COMPRESSED:
        table = tl.load(rows + row) * entries
        count = tl.load(counts + row)
        for start in range(0, count, BK):
            seen = start + k < count
            entry = tl.load(flat + table + start + k, mask=seen, other=0)
            keys = tl.load(pages + entry[:, None] * size + d[None, :], mask=seen[:, None] & in_d[None, :], other=0.0)
            sums, top, total = _block(query, keys, seen, sums, top, total, scale, PRECISION)
    release(OVERLAP)
    tl.store(out + place, sums / total[:, None], mask=in_h[:, None] & in_d[None, :])


def sink_attention(
    q: Tensor, fresh: Tensor, ring: Tensor, window: Sources, compressed: Compressed | None, sinks: Tensor, scale: float
) -> Tensor:
    count, heads, size = q.shape
    q, fresh = q.contiguous(), fresh.contiguous()
    out = torch.empty_like(q)
    wanted = (window.fresh, window.places, window.from_ring.view(torch.uint8), window.visible.view(torch.uint8))
    width, (sources, places, from_ring, visible) = window.visible.shape[1], (part.contiguous() for part in wanted)
    pages, flat, rows, counts, entries = q, places, places, places, 0  # never read
    if compressed is not None:
        pages, entries = compressed.pages, compressed.entries.flat.shape[1]
        flat, rows = compressed.entries.flat.contiguous(), compressed.entries.rows.contiguous()
        counts = compressed.entries.counts.contiguous()
    block = max(16, triton.next_power_of_2(size))
    _attend_kernel[(count, triton.cdiv(heads, 16))](
        q, fresh, ring, sources, places, from_ring, visible, pages, flat, rows, counts, sinks, out,
        heads, size, width, entries, scale,
        BH=16, BK=32, BD=block, COMPRESSED=compressed is not None,
        PRECISION='ieee' if q.dtype == torch.float32 else 'tf32', num_warps=4 if block < 256 else 8, num_stages=1,
        **launch_options(q.device),
    )  # fmt: skip
    return out
