"""What host and device tell each other: StepPlan down, StepResult up. Plain data, no torch.

The host owns pages, slots and admission; the device owns each slot's length, anchor, drafts and finished flag, and is
read back one step late at most. Whatever the host wants changed on the device travels as a record in the plan, applied
at the head of the step. Next: scheduler/scheduler.py, which writes plans and reads results.
"""

from dataclasses import dataclass
from enum import Flag, auto

from specdec.messages import SamplingParams


class Stage(Flag):
    """What a step does beyond the argmax of its rows. The host knows, so that no row pays for what nobody asked for.

    NOISE: somebody samples; FILTERS: top-k, top-p or min-p; BANS: ids that a request may not emit, or not yet; WORDS:
    bad words of several tokens; BIAS; PENALTIES: repetition, presence or frequency; MASKS: allowed ids or a grammar;
    THINKING: a budget for reasoning; DRAFT_NOISE: somebody's drafts are drawn with noise; RATIO: somebody's are tested
    by p / q.
    """

    NOISE = auto()
    FILTERS = auto()
    BANS = auto()
    WORDS = auto()
    BIAS = auto()
    PENALTIES = auto()
    MASKS = auto()
    THINKING = auto()
    DRAFT_NOISE = auto()
    RATIO = auto()


NO_STAGE = Stage(0)
RULES = Stage.BANS | Stage.WORDS | Stage.BIAS | Stage.PENALTIES | Stage.MASKS | Stage.THINKING


def stages_of(params: SamplingParams, drafts: bool) -> Stage:
    """The stages that one request needs; `drafts`: it may have drafts."""
    samples = params.temperature > 0
    penalises = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
    asked = (
        (Stage.NOISE, samples),
        (Stage.FILTERS, samples and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)),
        (Stage.BANS, bool(params.banned_ids) or params.device_min_tokens > 0),
        (Stage.WORDS, bool(params.bad_words)),
        (Stage.BIAS, bool(params.logit_bias)),
        (Stage.PENALTIES, penalises),
        (Stage.MASKS, bool(params.allowed_ids) or params.grammar is not None),
        (Stage.THINKING, params.thinking_budget is not None),
        (Stage.DRAFT_NOISE, samples and drafts and params.draft_sampling != 'greedy'),
        (Stage.RATIO, samples and drafts and params.draft_sampling == 'probabilistic'),
    )
    found = NO_STAGE
    for stage, wanted in asked:
        if wanted:
            found |= stage
    return found


@dataclass(frozen=True, slots=True)
class Admit:
    """A request takes `slot`. `length` tokens of it are committed already (a prefix hit).

    `end`: the first position at which it may hold no token (prompt + max_new_tokens, or session_len).
    `stop_from`: the first position at which a stop id may be drawn (prompt + min_new_tokens). `prompt_ids` are the
    request's own, `output_ids` what it had emitted before it lost an earlier slot. `state`: the copy of another slot's
    state at `length` that it begins with; 0 for none.
    """

    slot: int
    length: int
    end: int
    stop_from: int
    params: SamplingParams
    stages: Stage = NO_STAGE
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    state: int = 0


@dataclass(frozen=True, slots=True)
class Save:
    """Behind the step, what the slot keeps, at `length` tokens, is copied into `state`."""

    slot: int
    length: int
    state: int


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
class Candidate:
    """A request as the choice of verify lengths sees it: drafts `available` for this step, at most `cap` in any."""

    available: int
    cap: int


@dataclass(frozen=True, slots=True)
class LengthChoice:
    """`budget`: drafted rows of this step, None: all there are. `drafting`: whether it drafts blocks for the next."""

    budget: int | None
    drafting: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Request order, here and in the result: unfinished chunks, final chunks, decoding slots.

    `num_drafting`: how many of the sampling requests may use drafts in the next step; 0 lets the block pass be skipped.
    `row_bound`: at most so many rows belong to decoding slots, of which `draft_budget` may hold drafts (None: all
    there are); `table_width`: page-table columns in use. `stages`: what
    some sampling request needs; `top_k`: the largest one, 0 if some request that filters has none; `grammars`: slots of
    sampling requests that follow one. `logprobs`: None, or the largest number of alternatives asked for. `saves`:
    copies to be made of slots whose chunk ends on a page boundary.
    """

    step: int
    admits: tuple[Admit, ...]
    page_updates: tuple[PageUpdate, ...]
    chunks: tuple[Chunk, ...]
    decodes: tuple[int, ...]
    row_bound: int
    table_width: int
    num_drafting: int
    stages: Stage = NO_STAGE
    top_k: int = 0
    grammars: tuple[int, ...] = ()
    logprobs: int | None = None
    saves: tuple[Save, ...] = ()
    draft_budget: int | None = None

    @property
    def num_absorbing(self) -> int:
        """Leading requests that draw no token: their chunks do not end the prompt."""
        return sum(not chunk.final for chunk in self.chunks)

    @property
    def drawing_slots(self) -> tuple[int, ...]:
        """Slots of the requests that draw a token, in the order of the result."""
        return (*(chunk.slot for chunk in self.chunks if chunk.final), *self.decodes)


@dataclass(frozen=True, slots=True)
class SlotResult:
    """What one sampling request got: `token_ids` after the device's cut, `drafted` rows verified.

    `finish` None, 'stop', 'length', or 'error': no id was allowed on the row behind `token_ids`. `logprobs[i]`: token
    id to log-probability for emitted token i, its own first. `survival` [K]: of the block just drafted, if the host
    sets budgets by it.
    """

    slot: int
    token_ids: tuple[int, ...]
    drafted: int
    finish: str | None
    logprobs: tuple[dict[int, float], ...] | None = None
    survival: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    slots: tuple[SlotResult, ...]
