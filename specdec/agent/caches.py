"""How much memory the caches get, and the caches themselves: pages shared by target and draft through one page table.

Next: model_agent.py, which hands them to the models.
"""

from dataclasses import dataclass

import torch

from specdec.errors import ConfigError
from specdec.layers.cache_specs import CacheRoom, CacheSpec, SlotCache
from specdec.plan import StepPlan

USUAL_PAGE_SIZE = 64  # tokens; a page of so few that it never is what fills the memory
STATE_SHARE = 0.1  # of the cache memory, for copies of what is kept by slot


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`num_pages` include the scratch page. Bytes per token by cache; `free_bytes` were there to be shared out, of
    which `state_bytes` went to the slots' own state (rings, counts and masks of ids, distributions of probabilistic
    drafts) and `num_states` times `bytes_per_state` to copies of it at page boundaries.
    """

    num_pages: int
    page_size: int
    bytes_per_token: dict[str, float]
    free_bytes: int
    state_bytes: int = 0
    num_states: int = 0
    bytes_per_state: int = 0

    @property
    def cache_bytes(self) -> int:
        return self.num_pages * page_bytes(self.page_size, self.bytes_per_token)

    @property
    def token_capacity(self) -> int:
        """Tokens that fit in all pages but the scratch page."""
        return (self.num_pages - 1) * self.page_size

    def describe(self) -> str:
        """One line for people."""
        total = sum(self.bytes_per_token.values()) or 1
        shares = ', '.join(
            f'{name} {size / 1024:.1f} KiB ({size / total:.0%})' for name, size in self.bytes_per_token.items()
        )
        return (
            f'{self.num_pages} pages of {self.page_size} tokens = {self.cache_bytes / 2**20:.0f} MiB; '
            f'per token: {shares}; room for {self.token_capacity} tokens; '
            f'state of the slots: {self.state_bytes / 2**20:.0f} MiB'
            f'{f", {self.num_states} copies of {self.bytes_per_state / 2**20:.1f} MiB" if self.num_states else ""}'
        )


def plan_memory(
    specs: tuple[CacheSpec, ...],
    page_size: int,
    free_bytes: int,
    share: float,
    wanted_tokens: int,
    num_pages: int,
    state_bytes: int = 0,
    num_states: int | None = None,
    max_batch_size: int = 0,
) -> MemoryPlan:
    """Pages from `share` of the free bytes without `state_bytes`, but no more than `wanted_tokens` need (0 = no bound).

    `num_pages` > 0 overrides both. `num_states`: copies of what is kept by slot, none where nothing is; None: as many
    as STATE_SHARE of those bytes hold; never more than pages. ConfigError names the setting that asks for more than
    there is, or too little for one page beside the scratch page.
    """
    if state_bytes >= free_bytes:
        remedy = f'the slots of so many requests take {state_bytes} bytes of {free_bytes} free ones; lower it'
        raise ConfigError('max_batch_size', max_batch_size, remedy)
    bytes_per_state = sum(spec.bytes_per_state for spec in specs)
    room = int((free_bytes - state_bytes) * share)
    states = 0
    if bytes_per_state:
        states = int(room * STATE_SHARE) // bytes_per_state if num_states is None else num_states
        states = max(states, 0)
    per_token = {spec.name: spec.bytes_per_token for spec in specs}
    each = page_bytes(page_size, per_token)
    if num_pages:
        count = num_pages + 1
        _check_pages_fit(num_pages, each, free_bytes - state_bytes - min(states, num_pages) * bytes_per_state)
    else:
        count = (room - states * bytes_per_state) // each
        if count < 2:
            raise _no_room(page_size, per_token, free_bytes - state_bytes, share, num_states, bytes_per_state)
        if wanted_tokens:
            count = min(count, -(-wanted_tokens // page_size) + 1)
    return MemoryPlan(count, page_size, per_token, free_bytes, state_bytes, min(states, count - 1), bytes_per_state)


def _check_pages_fit(num_pages: int, each: int, free: int) -> None:
    if (num_pages + 1) * each > free:
        remedy = f'pages of {each} bytes, of which {max(free // each - 1, 0)} fit in {free} free bytes; lower it'
        raise ConfigError('num_gpu_blocks', num_pages, remedy)


def _no_room(
    page_size: int, per_token: dict[str, float], free: int, share: float, num_states: int | None, bytes_per_state: int
) -> ConfigError:
    """Which setting leaves no room for two pages in `share` of `free` bytes: copies of states, the page, the share."""
    each, room = page_bytes(page_size, per_token), int(free * share)
    have = f'{room} bytes, {share:g} of the free memory (cache_max_entry_count)'
    if num_states and room >= 2 * each:
        remedy = f'copies of {bytes_per_state} bytes leave no room for one page of {each} bytes in {have}; lower it'
        return ConfigError('prefix_cache_state_budget', num_states, remedy)
    if page_size > USUAL_PAGE_SIZE and room >= 2 * page_bytes(USUAL_PAGE_SIZE, per_token):
        remedy = f'a page takes {each} bytes, and two of them do not fit in {have}; lower it'
        return ConfigError('block_size', page_size, remedy)
    remedy = f'leaves no room for one page of {each} bytes in {free} free bytes; free memory or raise it'
    return ConfigError('cache_max_entry_count', share, remedy)


def page_bytes(page_size: int, bytes_per_token: dict[str, float]) -> int:
    """Of one page; a whole number, since a page holds whole entries where several tokens share one."""
    return round(page_size * sum(bytes_per_token.values()))


@dataclass(frozen=True, slots=True)
class Caches:
    """What the models' specs allocated; `draft` is None without a draft."""

    target: SlotCache
    draft: SlotCache | None

    @classmethod
    def allocate(cls, target: CacheSpec, draft: CacheSpec | None, room: CacheRoom, device: torch.device) -> 'Caches':
        return cls(target.allocate(room, device), None if draft is None else draft.allocate(room, device))

    def restore(self, plan: StepPlan) -> None:
        """At the head of a step: slots that begin behind a cached prefix take the state that goes with it."""
        for admit in plan.admits:
            if admit.state:
                for cache in self._by_slot():
                    cache.restore(admit.state, admit.slot, admit.length)

    def save(self, plan: StepPlan) -> None:
        """Behind a step: copies of slots whose chunk ended on a page boundary."""
        for save in plan.saves:
            for cache in self._by_slot():
                cache.save(save.slot, save.state, save.length)

    def _by_slot(self) -> tuple[SlotCache, ...]:
        return tuple(cache for cache in (self.target, self.draft) if cache is not None)
