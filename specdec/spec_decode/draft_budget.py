"""How many drafted rows a step may have, and whether drafting pays at all: the host's half of adaptive verify lengths.

A budget is chosen from survivals of blocks whose successors are drawn later, and from what steps cost; which drafts
then get the rows is decided on the device by the survivals of the very block (verify_length.py). Plain numbers, no
torch, so that the load simulation runs the same code. Next: scheduler/scheduler.py, which asks before every step.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from specdec.plan import Candidate, LengthChoice

MOST_BLOCKS = 1024  # survivals kept
PRIOR_ACCEPTANCE = 0.75  # of a position that nobody has tested yet
MULTIPLES = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def row_buckets(batch: int, num_drafts: int) -> tuple[int, ...]:
    """Row counts that a decode step of `batch` requests is sized for: one row each, up to all K + 1, a few between."""
    most = num_drafts + 1
    return tuple(sorted({int(batch * m) for m in MULTIPLES if m < most} | {batch * most}))


class Cost(Protocol):
    """Milliseconds that the phases of a step take."""

    def target(self, batch: int, rows: int) -> float: ...

    def absorb(self, batch: int, rows: int) -> float: ...

    def draft(self, batch: int) -> float: ...


@dataclass(frozen=True, slots=True)
class BudgetSettings:
    """`margin`: by what share another choice must be better than the one in force, so that noise does not flip it;
    `interval`: steps for which a choice stands while as many requests run, so that choosing costs little.

    `pool`: blocks whose survivals stand for what the next ones will be like, at least; more in a larger batch.
    `memory`: weight of a step's outcomes one step later; `prior`: how many drafts' worth of outcomes survivals are
    believed in advance. While nothing is drafted, `probe_steps` drafting steps find out whether that has changed, so
    seldom that they cost no more than `probe_share` of the time.
    """

    margin: float = 0.03
    interval: int = 4
    pool: int = 48
    memory: float = 0.98
    prior: float = 4.0
    probe_steps: int = 2
    probe_share: float = 0.01


class Expectation:
    """Tokens to expect of a step of `batch` requests that verifies so many drafts, the likeliest that they have.

    `blocks`: survivals [K] of blocks like those to come, at least `batch`; counts[k]: requests that have a draft k.
    Rows move between the requests of a step, not between steps: blocks are taken in groups of a batch, and averaged.
    """

    def __init__(self, blocks: Sequence[Sequence[float]], counts: Sequence[int], batch: int) -> None:
        self.batch = batch
        shares = [count / batch for count in counts]
        groups = [blocks[start : start + batch] for start in range(0, len(blocks) - batch + 1, batch)]
        self._sums = [self._corners(group, shares) for group in groups]

    @staticmethod
    def _corners(group: Sequence[Sequence[float]], shares: Sequence[float]) -> tuple[list[float], list[float]]:
        """Drafts and the tokens that they are expected to bring, summed from the likeliest on."""
        chances = sorted(
            ((block[k], share) for block in group for k, share in enumerate(shares) if share), reverse=True
        )
        drafts = list(accumulate((share for _, share in chances), initial=0.0))
        return drafts, list(accumulate((chance * share for chance, share in chances), initial=0.0))

    def __call__(self, budget: int) -> float:
        return self.batch + sum(_between(*corners, budget) for corners in self._sums) / len(self._sums)


def _between(sizes: list[float], values: list[float], size: float) -> float:
    """Linear between corners, the last value beyond them."""
    index = bisect_left(sizes, size)
    if index == len(sizes):
        return values[-1]
    if index == 0:
        return values[0]
    share = (size - sizes[index - 1]) / (sizes[index] - sizes[index - 1])
    return values[index - 1] + share * (values[index] - values[index - 1])


def best_budget(
    expected: Callable[[int], float], budgets: Sequence[int], cost: Callable[[int], float]
) -> tuple[int, float]:
    """The budget with the most expected tokens per millisecond: -> (budget, that rate); of equal ones the smallest.

    cost(budget) in ms. Every budget is looked at, not only those up to the first decline: real cost curves have steps.
    That is lossless only because what is expected was known before the drafts that the budget will be spent on.
    """
    rate, negative = max((expected(budget) / cost(budget), -budget) for budget in budgets)
    return -negative, rate


class AdaptiveBudget:
    """The policy with its memory: recent survivals, how far they can be trusted, the choice in force.

    `num_drafts` is K, above 0. `delay`: for how many choices a block's survivals wait before they count. A budget must
    not depend on the very drafts that it is for, so it is 1 where a step is read before the next one is planned.
    """

    def __init__(self, cost: Cost, num_drafts: int, delay: int = 1, settings: BudgetSettings | None = None) -> None:
        self.cost, self.num_drafts, self.delay = cost, num_drafts, delay
        self.settings = settings or BudgetSettings()
        self.choice = LengthChoice(0, True)
        prior = [PRIOR_ACCEPTANCE ** (k + 1) for k in range(num_drafts)]
        self._blocks: deque[Sequence[float]] = deque([prior] * 8, maxlen=MOST_BLOCKS)
        self._fresh: deque[list[Sequence[float]]] = deque([[]])  # reported since each of the latest choices
        self._promised, self._kept = [0.0] * num_drafts, [0.0] * num_drafts  # of verified drafts, decayed
        self._step_promised, self._step_kept = [0.0] * num_drafts, [0.0] * num_drafts
        self._drafting = True
        self._bucket: tuple[int, int] | None = None  # row bucket in force: (number of buckets, index)
        self._idle_steps = self._probing = self._batch_class = self._age = 0
        self._seen: object = None  # what the choice in force was made for
        self._probed = False  # the drafts at hand were made to find out whether drafting pays

    # ------------------------------------------------------------------------------------------------ what it learns
    def observe(self, survival: Sequence[float], verified: int, accepted: int) -> None:
        """One request's step: survivals of its block, of which `verified` drafts were tested and `accepted` passed."""
        for k in range(min(verified, self.num_drafts)):
            self._step_promised[k] += survival[k]
            self._step_kept[k] += k < accepted

    def report(self, survival: Sequence[float]) -> None:
        """Survivals of a block just drafted."""
        self._fresh[-1].append(survival)

    @property
    def trust(self) -> list[float]:
        """Per position, how many drafts were accepted for each one promised: 1 for a calibrated head.

        A position that is hardly ever verified is trusted as far as the one before it.
        """
        prior, ratio, found = self.settings.prior, 1.0, []
        for kept, promised in zip(self._kept, self._promised):
            ratio = (kept + prior * ratio) / (promised + prior)
            found.append(ratio)
        return found

    def _close_step(self) -> None:
        memory = self.settings.memory
        for sums, step in ((self._promised, self._step_promised), (self._kept, self._step_kept)):
            for k in range(self.num_drafts):
                sums[k] = sums[k] * memory + step[k]
                step[k] = 0.0
        self._fresh.append([])
        while len(self._fresh) > self.delay + 1:
            self._blocks.extend(self._fresh.popleft())

    # ----------------------------------------------------------------------------------------------- what it chooses
    def choose(self, decodes: Sequence[Candidate], joining: Sequence[Candidate], other_rows: int) -> LengthChoice:
        """`decodes` are in this step with their drafts, `joining` end their prompt in it; `other_rows` of prompts."""
        self._close_step()
        now = self._counts(c.available for c in decodes)
        soon = self._counts(c.cap for c in (*decodes, *joining))
        at_least = len(decodes) if self._probed else 0  # a probe has to test something
        seen = (now, soon, len(decodes), other_rows > 0)
        self._age += 1
        if seen != self._seen or self._age >= self.settings.interval or self._probed or self._probing:
            self._age, self._seen = 0, seen
            self.choice = self._choose(now, soon, len(decodes), len(decodes) + len(joining), other_rows)
        else:
            self._idle_steps += not self.choice.drafting
        if self.choice.budget < at_least:
            self.choice = LengthChoice(min(at_least, sum(now)), self.choice.drafting)
        return self.choice

    def _choose(self, now: list[int], soon: list[int], batch: int, total: int, other_rows: int) -> LengthChoice:
        """`now`, `soon`: requests with a draft at each position in this step, and in the next; `total` of the next."""
        blocks, budget = self._likely_blocks(total), 0
        drafting = bool(soon[0]) and self._decide_drafting(Expectation(blocks, soon, total), total)
        if now[0]:
            budget = self._choose_budget(Expectation(blocks, now, batch), batch, other_rows, drafting)
        return LengthChoice(min(budget, sum(now)), drafting)

    def _likely_blocks(self, batch: int) -> list[list[float]]:
        """The latest survivals of anybody, as far as they are to be trusted."""
        trust, count = self.trust, max(self.settings.pool, batch)
        latest = list(self._blocks)[-count:]
        believed = [[min(s * t, 1.0) for s, t in zip(block, trust)] for block in latest]
        return believed * -(-batch // len(believed))  # after a jump of the load there are fewer than requests

    def _counts(self, lengths: Iterable[int]) -> list[int]:
        """How many of the lengths reach beyond each position."""
        counts = [0] * self.num_drafts
        for length in lengths:
            for k in range(length):
                counts[k] += 1
        return counts

    def _choose_budget(self, expected: Expectation, batch: int, other_rows: int, drafting: bool) -> int:
        buckets = row_buckets(batch, self.num_drafts)
        drafted = self.cost.draft(batch) if drafting else 0.0

        def cost(budget: int) -> float:
            return self._verify_cost(batch, batch + budget + other_rows) + drafted

        best, rate = best_budget(expected, [rows - batch for rows in buckets], cost)
        index = buckets.index(batch + best)
        if self._bucket is not None and self._bucket[0] == len(buckets):
            kept = buckets[self._bucket[1]] - batch
            if rate < expected(kept) / cost(kept) * (1 + self.settings.margin):
                best, index = kept, self._bucket[1]
        self._bucket = (len(buckets), index)
        return best

    def _decide_drafting(self, expected: Expectation, batch: int) -> bool:
        """Whether to draft in this step, for the next one, with margin both ways and probes while it does not pay."""
        settings, batch_class = self.settings, batch.bit_length()
        changed, self._batch_class = batch_class != self._batch_class, batch_class
        self._probed = self._probing > 0
        if self._probed:
            self._probing -= 1
            return True
        gain = self._gain(expected, batch)
        self._drafting = gain >= (1 - settings.margin if self._drafting else 1 + settings.margin)
        if self._drafting:
            self._idle_steps = 0
            return True
        self._idle_steps += 1
        if changed or self._idle_steps > self._probe_interval(batch):
            self._idle_steps, self._probing, self._probed = 0, settings.probe_steps - 1, True
            return True
        return False

    def _gain(self, expected: Expectation, batch: int) -> float:
        """Tokens per millisecond with drafts over those without, in the long run of steps like this one."""
        budgets = [rows - batch for rows in row_buckets(batch, self.num_drafts)[1:]]
        drafted = self.cost.draft(batch)
        _, rate = best_budget(expected, budgets, lambda b: self._verify_cost(batch, batch + b) + drafted)
        return rate * self._verify_cost(batch, batch) / batch

    def _probe_interval(self, batch: int) -> float:
        """Steps between probes, each of which drafts and verifies a row more for everybody."""
        plain = self._verify_cost(batch, batch)
        extra = self.cost.draft(batch) + self._verify_cost(batch, 2 * batch) - plain
        return self.settings.probe_steps * extra / (plain * self.settings.probe_share)

    def _verify_cost(self, batch: int, rows: int) -> float:
        return self.cost.target(batch, rows) + self.cost.absorb(batch, rows)
