"""What a model keeps per token or per request, declared. Scheduler, memory plan and prefix cache know only these specs.

Paged: entries per token in pages shared by every layer group through one page table; a prefix hit, an eviction or a
preemption therefore holds for target and draft alike. By slot: state of a request, as large for long ones as for short
ones. Next: agent/caches.py, which allocates them.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """What there is to fill: pages of `page_size` tokens, page 0 scratch; slots, slot 0 scratch; states, copies of
    slots at page boundaries, state 0 unused.
    """

    num_pages: int
    page_size: int
    num_slots: int
    num_states: int = 0


class SlotCache(Protocol):
    """What a spec allocates, as the engine sees it: what lies in a slot can be copied where pages end."""

    def save(self, slot: int, state: int, length: int) -> None:
        """Copy what `slot` keeps behind `length` tokens, a multiple of the page size."""

    def restore(self, state: int, slot: int, length: int) -> None:
        """Let `slot` go on behind the `length` tokens at which the state was saved."""


class CacheSpec(Protocol):
    """What one model keeps: so many bytes for every token, for every slot and for the copy of a slot. `name` is for
    people.
    """

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def bytes_per_token(self) -> float: ...

    @property
    def bytes_per_slot(self) -> int: ...

    @property
    def bytes_per_state(self) -> int: ...

    def allocate(self, room: CacheRoom, device: torch.device) -> SlotCache: ...


@dataclass(frozen=True, slots=True)
class PagedSpec:
    """Keys and values of `num_layers` attention layers, one entry each per token."""

    name: str
    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_slot(self) -> int:
        return 0

    @property
    def bytes_per_state(self) -> int:
        return 0

    def allocate(self, room: CacheRoom, device: torch.device) -> 'PagedCache':
        """Zeroed pages, page 0 being scratch: padding rows write there, unused page-table entries point there."""
        shape = (room.num_pages, room.page_size, self.kv_heads, self.head_dim)
        layers = [torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(2 * self.num_layers)]
        return PagedCache(tuple(layers[::2]), tuple(layers[1::2]))


@dataclass(frozen=True, slots=True)
class PagedCache:
    """`k[l]`, `v[l]` [pages, page, kv_heads, head_dim] of layer l; every layer is addressed by one page table."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]

    def save(self, slot: int, state: int, length: int) -> None:
        """Nothing lies in a slot: whoever has the pages has everything."""

    def restore(self, state: int, slot: int, length: int) -> None:
        """As for save."""
