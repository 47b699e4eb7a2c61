"""What DeepSeek-V4 keeps: per request rings of recent rows, per token compressed entries in pages.

A ring holds what its readers look back at and K rows more, which a rejected tail may overwrite (kernels/ring). Next:
agent/caches.py, which allocates them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.layers.cache_specs import CacheRoom
from specdec.models.deepseek_v4.config import BundledDraft, DeepseekV4Config

PARTIAL_DTYPE = torch.float32


def lookback(ratio: int) -> int:
    """Rows that an entry is made of: ratio 4 overlaps with the entry before."""
    return 2 * ratio if ratio == 4 else ratio


def series(ratio: int) -> int:
    return 2 if ratio == 4 else 1


def kept_partials(ratio: int) -> int:
    """Rows that the next entry needs where a window has just ended: those of the series that overlaps."""
    return lookback(ratio) - ratio


@dataclass(frozen=True, slots=True)
class Ring:
    """`rows` [S, R, w]; `saved` [N + 1, k, w]: of each state the last k rows, which are all that counts there."""

    rows: Tensor
    saved: Tensor

    @classmethod
    def allocate(
        cls, room: CacheRoom, capacity: int, kept: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> 'Ring':
        rows = torch.zeros(room.num_slots, capacity, width, dtype=dtype, device=device)
        return cls(rows, torch.zeros(room.num_states + 1, kept, width, dtype=dtype, device=device))

    @property
    def capacity(self) -> int:
        return self.rows.shape[1]

    def save(self, slot: int, state: int, length: int) -> None:
        self.saved[state] = self.rows[slot].index_select(0, self._last(length))

    def restore(self, state: int, slot: int, length: int) -> None:
        self.rows[slot].index_copy_(0, self._last(length), self.saved[state])

    def _last(self, length: int) -> Tensor:
        """Places of the k rows before position `length`."""
        kept = self.saved.shape[1]
        return torch.arange(length - kept, length, device=self.rows.device) % self.capacity


@dataclass(frozen=True, slots=True)
class Partials:
    """A compressor's state: `ring` of (C, Z), rows of 2 c w in fp32; `pages` [P, page / r, w]: its entries."""

    ring: Ring
    pages: Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer: `window`, rows of d; `entries` of a compressed layer; `keys`, the indexer's, with ratio 4."""

    window: Ring
    entries: Partials | None = None
    keys: Partials | None = None


@dataclass(frozen=True, slots=True)
class DeepseekV4Caches:
    layers: tuple[LayerCache, ...]

    @property
    def rings(self) -> list[Ring]:
        partials = [p for layer in self.layers for p in (layer.entries, layer.keys) if p is not None]
        return [layer.window for layer in self.layers] + [p.ring for p in partials]

    def save(self, slot: int, state: int, length: int) -> None:
        """`length` is a multiple of 128, where no window of either ratio is open."""
        for ring in self.rings:
            ring.save(slot, state, length)

    def restore(self, state: int, slot: int, length: int) -> None:
        for ring in self.rings:
            ring.restore(state, slot, length)


@dataclass(frozen=True, slots=True)
class DeepseekV4CacheSpec:
    """Sizes of the target's caches with K = `num_drafts` verified drafts, its rows in `dtype`."""

    config: DeepseekV4Config
    num_drafts: int
    dtype: torch.dtype
    name: str = 'target'

    @property
    def bytes_per_token(self) -> float:
        """Entries, 1 / r of a token's each."""
        config = self.config
        widths = {0: 0, 4: config.head_dim + config.index_dim, 128: config.head_dim}
        return sum(widths[ratio] / ratio for ratio in config.ratios if ratio) * self.dtype.itemsize

    @property
    def bytes_per_slot(self) -> int:
        """Rings."""
        rows = {ratio: lookback(ratio) + self.num_drafts for ratio in (4, 128)}
        return self._ring_bytes(self.config.window + self.num_drafts, rows)

    @property
    def bytes_per_state(self) -> int:
        return self._ring_bytes(self.config.window - 1, {ratio: kept_partials(ratio) for ratio in (4, 128)})

    def _ring_bytes(self, window_rows: int, partial_rows: dict[int, int]) -> int:
        config = self.config
        size = config.num_layers * window_rows * config.head_dim * self.dtype.itemsize
        for ratio in filter(None, config.ratios):
            width = config.head_dim + (config.index_dim if ratio == 4 else 0)
            size += partial_rows[ratio] * 2 * series(ratio) * width * PARTIAL_DTYPE.itemsize
        return size

    def allocate(self, room: CacheRoom, device: torch.device) -> DeepseekV4Caches:
        """Zeroed; page 0 and slot 0 are scratch. Pages of a multiple of 128 tokens."""
        config = self.config

        def partials(ratio: int, width: int) -> Partials:
            rows, kept = lookback(ratio) + self.num_drafts, kept_partials(ratio)
            ring = Ring.allocate(room, rows, kept, 2 * series(ratio) * width, PARTIAL_DTYPE, device)
            shape = (room.num_pages, room.page_size // ratio, width)
            return Partials(ring, torch.zeros(shape, dtype=self.dtype, device=device))

        def layer(ratio: int) -> LayerCache:
            rows, kept = config.window + self.num_drafts, config.window - 1
            window = Ring.allocate(room, rows, kept, config.head_dim, self.dtype, device)
            entries = partials(ratio, config.head_dim) if ratio else None
            return LayerCache(window, entries, partials(ratio, config.index_dim) if ratio == 4 else None)

        return DeepseekV4Caches(tuple(layer(ratio) for ratio in config.ratios))


@dataclass(frozen=True, slots=True)
class DraftRings:
    """`windows[s]`, rows of d, of stage s."""

    windows: tuple[Ring, ...]

    def save(self, slot: int, state: int, length: int) -> None:
        for ring in self.windows:
            ring.save(slot, state, length)

    def restore(self, state: int, slot: int, length: int) -> None:
        for ring in self.windows:
            ring.restore(state, slot, length)


@dataclass(frozen=True, slots=True)
class DraftRingSpec:
    """Rings of the bundled draft's stages, W + g rows each; it keeps nothing in pages."""

    config: DeepseekV4Config
    draft: BundledDraft
    dtype: torch.dtype
    name: str = 'draft'

    @property
    def bytes_per_token(self) -> float:
        return 0

    @property
    def bytes_per_slot(self) -> int:
        return self._ring_bytes(self.config.window + self.draft.block_rows)

    @property
    def bytes_per_state(self) -> int:
        return self._ring_bytes(self.config.window)

    def _ring_bytes(self, rows: int) -> int:
        return self.draft.num_stages * rows * self.config.head_dim * self.dtype.itemsize

    def allocate(self, room: CacheRoom, device: torch.device) -> DraftRings:
        window, width = self.config.window, self.config.head_dim
        capacity = window + self.draft.block_rows
        stages = range(self.draft.num_stages)
        return DraftRings(tuple(Ring.allocate(room, capacity, window, width, self.dtype, device) for _ in stages))
