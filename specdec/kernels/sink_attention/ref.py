"""Sink attention in plain torch: each row's keys are gathered, some rows at a time so that they stay small."""

import torch
from torch import Tensor

from specdec.kernels.compressor import Entries
from specdec.kernels.ring import Sources, ring_read
from specdec.kernels.sink_attention import Compressed

GATHERED = 1 << 25  # numbers


def sink_attention(
    q: Tensor, fresh: Tensor, ring: Tensor, window: Sources, compressed: Compressed | None, sinks: Tensor, scale: float
) -> Tensor:
    width = window.visible.shape[1] + (0 if compressed is None else compressed.entries.flat.shape[1])
    height = max(1, GATHERED // (width * q.shape[2]))
    parts = [
        _attend(q[rows], fresh, ring, _rows_of(window, rows), _entries_of(compressed, rows), sinks, scale)
        for rows in (slice(first, first + height) for first in range(0, q.shape[0], height))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rows_of(window: Sources, rows: slice) -> Sources:
    return Sources(window.fresh[rows], window.places[rows], window.from_ring[rows], window.visible[rows])


def _entries_of(compressed: Compressed | None, rows: slice) -> Compressed | None:
    if compressed is None:
        return None
    entries = compressed.entries
    return Compressed(compressed.pages, Entries(entries.flat, entries.rows[rows], entries.counts[rows]))


def _attend(
    q: Tensor, fresh: Tensor, ring: Tensor, window: Sources, compressed: Compressed | None, sinks: Tensor, scale: float
) -> Tensor:
    keys, visible = ring_read(ring, fresh, window), window.visible
    if compressed is not None:
        flat, rows, counts = compressed.entries.flat, compressed.entries.rows, compressed.entries.counts
        there = torch.arange(flat.shape[1], device=flat.device) < counts[:, None]
        entries = compressed.pages.flatten(0, 1)[flat[rows]]
        keys = torch.cat([keys, torch.where(there[..., None], entries, 0)], 1)
        visible = torch.cat([visible, there], 1)
    keys = keys.float()
    scores = torch.bmm(q.float(), keys.transpose(1, 2)) * scale
    scores = scores.masked_fill(~visible[:, None], float('-inf'))
    everything = torch.cat([scores, sinks.expand(q.shape[0], -1)[..., None]], -1)
    return torch.bmm(everything.softmax(-1)[..., :-1], keys).to(q.dtype)
