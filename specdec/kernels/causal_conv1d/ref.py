"""The convolution in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.state_rows import StateRows


def causal_conv1d(x: Tensor, weight: Tensor, windows: Tensor, rows: StateRows) -> Tensor:
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    convolve_chunks(x, weight, windows, rows, out)
    decodes = rows.decodes()
    if len(decodes.slots):
        _convolve_decodes(x, weight, windows, decodes, out)
    return out


def convolve_chunks(x: Tensor, weight: Tensor, windows: Tensor, rows: StateRows, out: Tensor) -> None:
    """The prompt chunks' rows of `out`; their slots' windows begin anew in set 0."""
    if not rows.chunk_rows:
        return
    chunks, kept, start = rows.chunks(), [], 0
    for before, count in zip(_lookback(weight, windows, chunks), rows.chunk_rows):
        stop = start + count
        known = torch.cat([before, x[start:stop]])
        out[start:stop] = _convolve(known[None], weight)[0].to(out.dtype)
        kept.append(known[count:])
        start = stop
    windows[chunks.slots, 0, : weight.shape[1] - 1] = torch.stack(kept)


def _convolve_decodes(x: Tensor, weight: Tensor, windows: Tensor, rows: StateRows, out: Tensor) -> None:
    counts = rows.offsets[1:] - rows.offsets[:-1]
    height, kept = int(counts.max()), weight.shape[1] - 1
    step = torch.arange(height, device=x.device)
    index = (rows.offsets[:-1, None] + step).clamp(max=x.shape[0] - 1)
    known = torch.cat([_lookback(weight, windows, rows), x[index]], 1)
    mine = step < counts[:, None]
    out[index[mine]] = _convolve(known, weight)[mine].to(out.dtype)
    windows[rows.slots, 1 - rows.parity, : kept + height] = known


def _lookback(weight: Tensor, windows: Tensor, rows: StateRows) -> Tensor:
    """The W - 1 rows before each request's first one [B, W - 1, C]."""
    kept = weight.shape[1] - 1
    places = rows.pending[:, None] + torch.arange(kept, device=windows.device)
    found = windows[rows.slots[:, None], rows.parity[:, None], places]
    return torch.where(rows.fresh[:, None, None], 0, found)


def _convolve(known: Tensor, weight: Tensor) -> Tensor:
    """known [B, W - 1 + n, C] -> [B, n, C]; tap by tap, so that a row's sum never depends on how many there are."""
    wide = torch.promote_types(known.dtype, torch.float32)
    width, count = weight.shape[1], known.shape[1] - weight.shape[1] + 1
    known, weight = known.to(wide), weight.to(wide)
    total = known[:, :count] * weight[:, 0]
    for j in range(1, width):
        total = torch.addcmul(total, known[:, j : j + count], weight[:, j])
    return F.silu(total)
