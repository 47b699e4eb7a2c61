"""What host and device tell each other: StepPlan down, StepResult up. Plain data, no torch.

The host owns pages, slots and admission; the device owns each slot's length, anchor, drafts and finished flag, and is
read back one step late at most. Whatever the host wants changed on the device travels as a record in the plan, applied
at the head of the step. Next: scheduler/scheduler.py, which writes plans and reads results.
"""

from dataclasses import dataclass

from specdec.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class Admit:
    """A request takes `slot`. `length` tokens of it are committed already (a prefix hit).

    `end`: the first position at which it may hold no token (prompt + max_new_tokens, or session_len).
    `stop_from`: the first position at which a stop id may be drawn (prompt + min_new_tokens).
    """

    slot: int
    length: int
    end: int
    stop_from: int
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class PageUpdate:
    """Entries `index`, `index` + 1, ... of the slot's page table become `pages`."""

    slot: int
    index: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens at positions start, start + 1, ...; `final` if the prompt ends with them and a token is drawn."""

    slot: int
    start: int
    token_ids: tuple[int, ...]
    final: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Request order, here and in the result: unfinished chunks, final chunks, decoding slots.

    `num_drafting`: how many of the sampling requests may use drafts in the next step; 0 lets the block pass be skipped.
    `row_bound`: at most so many rows belong to decoding slots; `table_width`: page-table columns in use. `samples`:
    some request draws with noise; `filters`: some has top-k, top-p or min-p; `bans`: some has banned ids or a minimum
    length; `logprobs`: None, or the largest number of alternatives asked for.
    """

    step: int
    admits: tuple[Admit, ...]
    page_updates: tuple[PageUpdate, ...]
    chunks: tuple[Chunk, ...]
    decodes: tuple[int, ...]
    row_bound: int
    table_width: int
    num_drafting: int
    samples: bool = False
    filters: bool = False
    bans: bool = False
    logprobs: int | None = None

    @property
    def num_absorbing(self) -> int:
        """Leading requests that draw no token: their chunks do not end the prompt."""
        return sum(not chunk.final for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class SlotResult:
    """What one sampling request got: `token_ids` after the device's cut, `drafted` rows verified.

    `finish` None, 'stop' or 'length'. `logprobs[i]`: token id to log-probability for emitted token i, its own first.
    """

    slot: int
    token_ids: tuple[int, ...]
    drafted: int
    finish: str | None
    logprobs: tuple[dict[int, float], ...] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    slots: tuple[SlotResult, ...]
