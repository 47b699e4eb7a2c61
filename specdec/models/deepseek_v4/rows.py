"""What the rows of a step read and where they write, worked out once and used by every layer.

All sizes come from what the host knows (chunk lengths, the most rows of a decoding request, the page table's width);
which of the rows, windows and entries are real is decided by masks on the device. Next: attention.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.compressor import Entries
from specdec.kernels.paged_attention import RowLayout
from specdec.kernels.ring import RingStep, Sources, ring_places, ring_step, sources
from specdec.models.deepseek_v4.caches import lookback
from specdec.models.deepseek_v4.rotary import PairRotary, Rotation
from specdec.models.target import Rows


@dataclass(frozen=True, slots=True)
class Windows:
    """Entries that a step may complete, N of them: `rows` [N, c r] of each, its rotation, and where it goes.

    `places` [T]: where each row's own (C, Z) go; `phases` [T]: its place in its window. `targets` [N]: flat entries,
    0 for a window that is not complete.
    """

    rows: Sources
    rotation: Rotation
    targets: Tensor
    places: Tensor
    phases: Tensor


@dataclass(frozen=True, slots=True)
class StepRows:
    """T rows: `window` their keys in the ring and the step, `places` where their own go; by ratio what else."""

    window: Sources
    places: Tensor
    plain: Rotation
    compressed: Rotation
    windows: Mapping[int, Windows]
    entries: Mapping[int, Entries]


def plan_rows(
    rows: Rows,
    window: int,
    capacity: int,
    partial_capacities: Mapping[int, int],
    rotaries: tuple[PairRotary, PairRotary],
) -> StepRows:
    """`capacity` of window rings and, by ratio, of partial rings; plain and compressed rotary."""
    layout, positions = rows.layout, rows.positions
    step = ring_step(layout.row_offsets, layout.contexts, rows.request_slots, positions)
    back = torch.arange(window - 1, -1, -1, device=positions.device)
    table = F.pad(layout.page_table.long(), (0, 0, 0, 1))  # padding rows have no pages
    return StepRows(
        window=sources(step, step.requests, positions[:, None] - back, capacity),
        places=ring_places(step, capacity),
        plain=rotaries[0].at(positions),
        compressed=rotaries[1].at(positions),
        windows={
            ratio: _windows(step, layout, table, ratio, size, rotaries[1]) for ratio, size in partial_capacities.items()
        },
        entries={ratio: _entries(step, table, layout.page_size, ratio) for ratio in partial_capacities},
    )


def _windows(
    step: RingStep, layout: RowLayout, table: Tensor, ratio: int, capacity: int, rotary: PairRotary
) -> Windows:
    requests, ordinals = _candidates(layout, ratio, step.positions.device)
    entry = step.starts[requests] // ratio + ordinals
    last = (entry + 1) * ratio
    reach = lookback(ratio)
    positions = last[:, None] + torch.arange(-reach, 0, device=last.device)
    column, per_page = entry * ratio // layout.page_size, layout.page_size // ratio
    there = (last <= step.ends[requests]) & (column < table.shape[1])
    page = table[requests, column.clamp(max=table.shape[1] - 1)]
    return Windows(
        rows=sources(step, requests, positions, capacity),
        rotation=rotary.at(entry * ratio),
        targets=torch.where(there, page * per_page + entry % per_page, 0),
        places=ring_places(step, capacity),
        phases=step.positions % ratio,
    )


def _candidates(layout: RowLayout, ratio: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Request, and ordinal within the step, of every window that n rows in a row can complete: (n - 1) // r + 1."""
    num_chunks = len(layout.chunk_rows)
    requests, ordinals = [], []
    for request, rows in enumerate(layout.chunk_rows):
        count = (rows - 1) // ratio + 1
        requests.append(torch.full((count,), request, device=device))
        ordinals.append(torch.arange(count, device=device))
    decoding = torch.arange(num_chunks, layout.contexts.shape[0], device=device)
    count = (layout.tile_rows - 1) // ratio + 1
    requests.append(decoding.repeat_interleave(count))
    ordinals.append(torch.arange(count, device=device).repeat(decoding.shape[0]))
    return torch.cat(requests), torch.cat(ordinals)


def _entries(step: RingStep, table: Tensor, page_size: int, ratio: int) -> Entries:
    per_page = page_size // ratio
    flat = (table[:, :, None] * per_page + torch.arange(per_page, device=table.device)).flatten(1)
    return Entries(flat, step.requests, (step.positions + 1) // ratio)
