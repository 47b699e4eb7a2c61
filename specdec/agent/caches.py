"""How much memory the caches get, and the caches themselves: pages shared by target and draft through one page table.

Next: model_agent.py, which hands them to the models.
"""

from dataclasses import dataclass

import torch

from specdec.errors import ConfigError
from specdec.layers.cache_specs import PagedCache, PagedSpec


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`num_pages` include the scratch page. Bytes per token by cache; `free_bytes` were there to be shared out, of
    which `state_bytes` went to the slots' own state (counts and masks of ids, distributions of probabilistic drafts).
    """

    num_pages: int
    page_size: int
    bytes_per_token: dict[str, int]
    free_bytes: int
    state_bytes: int = 0

    @property
    def cache_bytes(self) -> int:
        return self.num_pages * self.page_size * sum(self.bytes_per_token.values())

    @property
    def token_capacity(self) -> int:
        """Tokens that fit in all pages but the scratch page."""
        return (self.num_pages - 1) * self.page_size

    def describe(self) -> str:
        """One line for people."""
        total = sum(self.bytes_per_token.values())
        shares = ', '.join(
            f'{name} {size / 1024:.1f} KiB ({size / total:.0%})' for name, size in self.bytes_per_token.items()
        )
        return (
            f'{self.num_pages} pages of {self.page_size} tokens = {self.cache_bytes / 2**20:.0f} MiB; '
            f'per token: {shares}; room for {self.token_capacity} tokens; '
            f'state of the slots: {self.state_bytes / 2**20:.0f} MiB'
        )


def plan_memory(
    specs: tuple[PagedSpec, ...],
    page_size: int,
    free_bytes: int,
    share: float,
    wanted_tokens: int,
    num_pages: int,
    state_bytes: int = 0,
) -> MemoryPlan:
    """Pages from `share` of the free bytes without `state_bytes`, but no more than `wanted_tokens` need (0 = no bound).

    `num_pages` > 0 overrides both. ConfigError if not even one page beside the scratch page fits.
    """
    per_token = {spec.name: spec.bytes_per_token for spec in specs}
    page_bytes = page_size * sum(per_token.values())
    count = num_pages + 1 if num_pages else int((free_bytes - state_bytes) * share) // page_bytes
    if not num_pages and wanted_tokens:
        count = min(count, -(-wanted_tokens // page_size) + 1)
    if count < 2:
        free = free_bytes - state_bytes
        raise ConfigError(
            'cache_max_entry_count',
            share,
            f'leaves no room for one page of {page_bytes} bytes in {free} free bytes; free memory or raise it',
        )
    return MemoryPlan(count, page_size, per_token, free_bytes, state_bytes)


@dataclass(frozen=True, slots=True)
class Caches:
    """`draft` is empty without a draft."""

    target: PagedCache
    draft: PagedCache

    @classmethod
    def allocate(cls, target: PagedSpec, draft: PagedSpec | None, plan: MemoryPlan, device: torch.device) -> 'Caches':
        own = PagedCache((), ()) if draft is None else draft.allocate(plan.num_pages, plan.page_size, device)
        return cls(target.allocate(plan.num_pages, plan.page_size, device), own)
