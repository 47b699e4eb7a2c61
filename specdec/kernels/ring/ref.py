"""Rings in plain torch."""

import torch
from torch import Tensor

from specdec.kernels.ring import Sources


def ring_read(ring: Tensor, fresh: Tensor, wanted: Sources) -> Tensor:
    old = ring.flatten(0, 1)[wanted.places]
    rows = torch.where(wanted.from_ring[..., None], old, fresh[wanted.fresh])
    return torch.where(wanted.visible[..., None], rows, 0)


def ring_write(ring: Tensor, rows: Tensor, places: Tensor) -> None:
    ring.flatten(0, 1).index_copy_(0, places, rows.to(ring.dtype))
