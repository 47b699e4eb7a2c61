"""Per-request rings: the last rows of a request, row of position p at place p mod R of its slot.

A step reads before it writes: keys older than the step come from the ring, the step's own from its fresh rows. So a
chunk of any length may pass through a ring that holds a window only, and a ring of `window + K` rows keeps every row
that is needed after any number of a verify step's rows turns out rejected, since those overwrote only rows that had
left the window by then (docs/deepseek_v4.md). Slot 0 is scratch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.dispatch import Implementations

_implementation = Implementations(__name__)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where each of N readers finds its L rows, all [N, L]: `from_ring` chooses between `places`, flat rows of a ring
    [S * R], and `fresh`, rows of the step. Rows that are not `visible` may hold anything; both indices are in range.
    """

    fresh: Tensor
    places: Tensor
    from_ring: Tensor
    visible: Tensor


@dataclass(frozen=True, slots=True)
class RingStep:
    """A step's T packed rows against the rings of its B requests; padding rows belong to request B, which has slot 0.

    requests, positions [T]; per request and once more for padding, [B + 1]: slots, starts (position of its first row),
    ends (position behind its last row), offsets (packed row of its first row).
    """

    requests: Tensor
    positions: Tensor
    slots: Tensor
    starts: Tensor
    ends: Tensor
    offsets: Tensor


def ring_step(row_offsets: Tensor, starts: Tensor, slots: Tensor, positions: Tensor) -> RingStep:
    """row_offsets [B + 1], starts and slots [B], positions [T], all int64."""
    row = torch.arange(positions.shape[0], device=positions.device)
    requests = torch.searchsorted(row_offsets[1:].contiguous(), row, right=True)
    padded = torch.nn.functional.pad(torch.stack([slots, starts, starts + row_offsets.diff()]), (0, 1))
    return RingStep(requests, positions, padded[0], padded[1], padded[2], row_offsets)


def sources(step: RingStep, requests: Tensor, positions: Tensor, capacity: int) -> Sources:
    """Where rows of `positions` [N, L] of `requests` [N] lie, in rings of `capacity` rows; negative ones are hidden."""
    starts = step.starts[requests][:, None]
    fresh = step.offsets[requests][:, None] + positions - starts
    places = step.slots[requests][:, None] * capacity + positions.clamp(min=0) % capacity
    return Sources(fresh.clamp(0, step.positions.shape[0] - 1), places, positions < starts, positions >= 0)


def ring_places(step: RingStep, capacity: int) -> Tensor:
    """Flat ring row [T] that each of the step's rows is written to: of a long chunk only the last `capacity` stay."""
    kept = step.positions >= step.ends[step.requests] - capacity
    return torch.where(kept, step.slots[step.requests], 0) * capacity + step.positions % capacity


def ring_read(ring: Tensor, fresh: Tensor, wanted: Sources) -> Tensor:
    """ring [S, R, D], fresh [T, D] -> rows [N, L, D]; zeros where they are not visible."""
    return _implementation(ring.device.type, 'ring_read')(ring, fresh, wanted)


def ring_write(ring: Tensor, rows: Tensor, places: Tensor) -> None:
    """Rows [T, D] to the flat rows `places` [T] of ring [S, R, D]; any number of rows may go to slot 0."""
    _implementation(ring.device.type, 'ring_write')(ring, rows, places)
