"""Index scores on a GPU: a row and a block of its entries per program, keys fetched from the pages.

The choice among them is a sort, as in the reference.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.compressor import Entries
from specdec.kernels.indexer.ref import best
from specdec.kernels.launch import launch_options, release, wait


@triton.jit
def _scores_kernel(
    queries, weights, pages, flat, rows, counts, out, heads, size, entries,
    BH: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BE
    h, d, e = tl.arange(0, BH), tl.arange(0, BD), first + tl.arange(0, BE)
    in_h, in_d = h < heads, d < size
    wait(OVERLAP)
    count = tl.load(counts + row)
    seen = e < count
    total = tl.full((BE,), float('-inf'), tl.float32)
    if first < count:
        table = tl.load(rows + row) * entries
        place = tl.load(flat + table + e, mask=seen, other=0)
        keys = tl.load(pages + place[:, None] * size + d[None, :], mask=seen[:, None] & in_d[None, :], other=0.0)
        source = queries + (row * heads + h)[:, None] * size + d[None, :]
        query = tl.load(source, mask=in_h[:, None] & in_d[None, :], other=0.0)
        signed = tl.load(weights + row * heads + h, mask=in_h, other=0.0)
        products = tl.maximum(tl.dot(keys, tl.trans(query), input_precision=PRECISION), 0.0)
        total = tl.where(seen, tl.sum(products * signed[None, :], 1), float('-inf'))
    release(OVERLAP)
    tl.store(out + row * entries + e, total, mask=e < entries)


def choose_entries(queries: Tensor, weights: Tensor, pages: Tensor, entries: Entries, k: int) -> Entries:
    return best(scores(queries, weights, pages, entries), entries, k)


def scores(queries: Tensor, weights: Tensor, pages: Tensor, entries: Entries) -> Tensor:
    """[T, E] fp32, -inf where a row sees nothing."""
    count, heads, size = queries.shape
    width = entries.flat.shape[1]
    out = torch.empty(count, width, dtype=torch.float32, device=queries.device)
    block = 64
    _scores_kernel[(count, triton.cdiv(width, block))](
        queries.contiguous(), weights.contiguous(), pages, entries.flat.contiguous(), entries.rows.contiguous(),
        entries.counts.contiguous(), out, heads, size, width,
        BH=max(16, triton.next_power_of_2(heads)), BE=block, BD=max(16, triton.next_power_of_2(size)),
        PRECISION='ieee' if queries.dtype == torch.float32 else 'tf32', num_warps=4, **launch_options(queries.device),
    )  # fmt: skip
    return out
