"""Compressed entries in plain torch."""

import torch
from torch import Tensor

from specdec.kernels.ring import Sources, ring_read


def compress(ring: Tensor, fresh: Tensor, windows: Sources, overlap: bool) -> Tensor:
    values, gates = ring_read(ring, fresh, windows).chunk(2, -1)
    if overlap:
        values, gates = _two_series(values), _two_series(gates)
    weights = gates.masked_fill(~windows.visible[..., None], float('-inf')).softmax(1)
    return (weights * values).sum(1)


def _two_series(rows: Tensor) -> Tensor:
    """Rows [N, 2 r, 2 w]: series A of the first r, series B of the last r -> [N, 2 r, w]."""
    ratio, width = rows.shape[1] // 2, rows.shape[2] // 2
    return torch.cat([rows[:, :ratio, :width], rows[:, ratio:, width:]], 1)


def write_entries(pages: Tensor, entries: Tensor, targets: Tensor) -> None:
    pages.flatten(0, 1).index_copy_(0, targets, entries.to(pages.dtype))
