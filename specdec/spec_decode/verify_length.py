"""How many drafts of each request are verified in a step: the device's half of the choice, as functions over tensors.

What they may look at: what was known before the drafts were drawn, and survivals that depend on a draft's prefix only;
so that whether draft k is verified never depends on draft k (docs/verify_lengths.md has the argument). The host's half,
how many rows a step may have at all, is draft_budget.py. Next: agent/batch.py, which packs that many rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.spec_decode.draft_budget import PRIOR_ACCEPTANCE

NO_BUDGET = 2**31 - 1


def fixed(num_drafts: Tensor, caps: Tensor, room: Tensor) -> Tensor:
    """Every draft there is, up to the request's own cap and what its limits leave; all [B] int64.

    `room` is the number of tokens that the request may still emit: a step emits one more than it accepts.
    """
    return num_drafts.minimum(caps).minimum(room - 1).clamp(min=0)


def threshold(available: Tensor, survival: Tensor, limit: float) -> Tensor:
    """Drafts before the first whose own confidence is below `limit`: available [B], survival [B, K] fp32 -> [B].

    The confidence of draft k is its survival over that of draft k - 1 (DeepSpec's `confidence_threshold`).
    """
    before = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], 1)
    confident = survival >= limit * before
    return confident.cumprod(1).sum(1).minimum(available)


def admit(available: Tensor, survival: Tensor, budget: Tensor) -> Tensor:
    """The `budget` [1] int64 drafts of the batch that survive most likely: available [B], survival [B, K] -> [B].

    Equal survivals are admitted by position in the block, then by place in the batch. A draft never counts as likelier
    than those before it, so what is admitted of a request is a prefix. Without synchronisation: shapes are fixed.
    """
    num_requests, num_drafts = survival.shape
    chances = survival.cummin(1).values.t()  # by position first: a stable sort then breaks ties as promised
    step = torch.arange(num_drafts, device=survival.device)
    usable = ((step[:, None] < available) & (chances > 0)).flatten()
    order = torch.where(usable, chances.flatten(), -1.0).sort(descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return (usable & (rank < budget)).view(num_drafts, num_requests).sum(0)


@dataclass(frozen=True, slots=True)
class LengthRule:
    """`choose`: what each request has available [B], its survivals [B, K], the step's budget [1] -> lengths [B].

    `reads_survival`: the step has to keep survivals; `reports_survival`: the host, which sets the budget, sees them.
    """

    choose: Callable[[Tensor, Tensor, Tensor], Tensor]
    reads_survival: bool = False
    reports_survival: bool = False


EVERY_DRAFT = LengthRule(lambda available, *_: available)
ADMITTED = LengthRule(admit, reads_survival=True, reports_survival=True)


def threshold_rule(limit: float) -> LengthRule:
    return LengthRule(lambda available, survival, _: threshold(available, survival, limit), reads_survival=True)


# --------------------------------------------------------------------------------- survivals without a confidence head
PRIOR_TESTS = 4.0  # how many tests the prior is worth, of the engine's mean and of a request
REQUEST_MEMORY = 0.95  # what a test weighs one step later
ENGINE_MEMORY = 0.98


@dataclass(frozen=True, slots=True)
class AcceptanceHistory:
    """How often each position of a block was accepted once its test was reached, per slot and of the whole engine.

    tested, passed [S, K] fp32, decayed counts; row 0, the scratch slot's, holds the engine's own. It looks at verdicts
    alone, never at a token; positions behind a rejected draft, or not verified, leave no trace.
    """

    tested: Tensor
    passed: Tensor

    @classmethod
    def allocate(cls, num_slots: int, num_drafts: int, device: torch.device) -> 'AcceptanceHistory':
        shape = (num_slots, num_drafts)
        return cls(torch.zeros(shape, device=device), torch.zeros(shape, device=device))

    def forget(self, slot: int) -> None:
        """A new tenant starts from the engine's mean."""
        self.tested[slot] = 0
        self.passed[slot] = 0

    def observe(self, slots: Tensor, lengths: Tensor, accepted: Tensor) -> None:
        """After a verdict: of `lengths` [B] verified drafts of each slot [B] the first `accepted` [B] were."""
        step = torch.arange(self.tested.shape[1], device=slots.device)
        real = (slots > 0)[:, None]
        reached = (step < lengths[:, None]) & (step <= accepted[:, None]) & real
        passed = (reached & (step < accepted[:, None])).float()
        reached = reached.float()
        anyone = reached.sum(0)
        keep = torch.where(anyone > 0, ENGINE_MEMORY, 1.0)
        engine = self.tested[0] * keep + anyone, self.passed[0] * keep + passed.sum(0)
        keep = torch.where(reached > 0, REQUEST_MEMORY, 1.0)
        own = self.tested[slots] * keep + reached, self.passed[slots] * keep + passed
        for table, rows, first in zip((self.tested, self.passed), own, engine, strict=True):
            table.index_copy_(0, slots, rows)
            table[0] = first

    def survival(self, slots: Tensor) -> Tensor:
        """The chance that drafts 1..k are all accepted [B, K]: a request's own rates, shrunk towards the engine's."""
        engine = (self.passed[0] + PRIOR_TESTS * PRIOR_ACCEPTANCE) / (self.tested[0] + PRIOR_TESTS)
        rates = (self.passed[slots] + PRIOR_TESTS * engine) / (self.tested[slots] + PRIOR_TESTS)
        return rates.cumprod(1)


# ---------------------------------------------------------------------------------------------------- a reference
def early_stopped(confidences: Sequence[Sequence[float]], steps_per_second: Callable[[int], float]) -> list[int]:
    """Algorithm 1 of the DSpark paper: lengths for the current confidences c [R][g], stopped at the first decline.

    steps_per_second(rows): what the target runs at that many rows.

    Stopping early keeps it lossless although it looks at current confidences: a later one is never consulted for an
    earlier draft. Used as an oracle of tests and as an arm of the load simulation; the engine's own rule is `admit`.
    """
    chances = []
    for request, row in enumerate(confidences):
        survival = 1.0
        for position, confidence in enumerate(row):
            survival *= confidence
            if survival > 0:
                chances.append((-survival, position, request))
    lengths = [0] * len(confidences)
    rows, expected = len(confidences), float(len(confidences))
    best = expected * steps_per_second(rows)
    for chance, position, request in sorted(chances):
        rows, expected = rows + 1, expected - chance
        rate = expected * steps_per_second(rows)
        if rate <= best:
            break
        best, lengths[request] = rate, position + 1
    return lengths
