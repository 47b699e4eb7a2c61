"""What DeepSeek-V4 keeps: per request rings of recent rows, per token compressed entries in pages.

A ring holds what its readers look back at and K rows more, which a rejected tail may overwrite (kernels/ring). Next:
agent/caches.py, which allocates them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.layers.cache_specs import CacheRoom
from specdec.models.deepseek_v4.config import DeepseekV4Config

PARTIAL_DTYPE = torch.float32


def lookback(ratio: int) -> int:
    """Rows that an entry is made of: ratio 4 overlaps with the entry before."""
    return 2 * ratio if ratio == 4 else ratio


def series(ratio: int) -> int:
    return 2 if ratio == 4 else 1


@dataclass(frozen=True, slots=True)
class Partials:
    """A compressor's state: `ring` [S, R, 2 c w] fp32 of (C, Z); `pages` [P, page / r, w]: its entries."""

    ring: Tensor
    pages: Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer: `window` [S, W + K, d]; `entries` of a compressed layer; `keys`, the indexer's, with ratio 4."""

    window: Tensor
    entries: Partials | None = None
    keys: Partials | None = None


@dataclass(frozen=True, slots=True)
class DeepseekV4Caches:
    layers: tuple[LayerCache, ...]


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
        config = self.config
        size = config.num_layers * (config.window + self.num_drafts) * config.head_dim * self.dtype.itemsize
        for ratio in filter(None, config.ratios):
            width = config.head_dim + (config.index_dim if ratio == 4 else 0)
            rows = lookback(ratio) + self.num_drafts
            size += rows * 2 * series(ratio) * width * PARTIAL_DTYPE.itemsize
        return size

    def allocate(self, room: CacheRoom, device: torch.device) -> DeepseekV4Caches:
        """Zeroed; page 0 and slot 0 are scratch. pages of a multiple of 128 tokens."""
        config = self.config

        def partials(ratio: int, width: int) -> Partials:
            rows = lookback(ratio) + self.num_drafts
            shape = (room.num_slots, rows, 2 * series(ratio) * width)
            return Partials(
                torch.zeros(shape, dtype=PARTIAL_DTYPE, device=device),
                torch.zeros(room.num_pages, room.page_size // ratio, width, dtype=self.dtype, device=device),
            )

        def layer(ratio: int) -> LayerCache:
            rows = config.window + self.num_drafts
            window = torch.zeros(room.num_slots, rows, config.head_dim, dtype=self.dtype, device=device)
            entries = partials(ratio, config.head_dim) if ratio else None
            return LayerCache(window, entries, partials(ratio, config.index_dim) if ratio == 4 else None)

        return DeepseekV4Caches(tuple(layer(ratio) for ratio in config.ratios))


@dataclass(frozen=True, slots=True)
class DraftRings:
    """`windows[s]` [S, W + g, d] of stage s."""

    windows: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class DraftRingSpec:
    """Rings of the bundled draft's stages; it keeps nothing in pages."""

    config: DeepseekV4Config
    dtype: torch.dtype
    name: str = 'draft'

    @property
    def bytes_per_token(self) -> float:
        return 0

    @property
    def bytes_per_slot(self) -> int:
        draft = self.config.draft
        assert draft is not None
        return draft.num_stages * (self.config.window + draft.block_rows) * self.config.head_dim * self.dtype.itemsize

    def allocate(self, room: CacheRoom, device: torch.device) -> DraftRings:
        draft = self.config.draft
        assert draft is not None
        shape = (room.num_slots, self.config.window + draft.block_rows, self.config.head_dim)
        return DraftRings(tuple(torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(draft.num_stages)))
