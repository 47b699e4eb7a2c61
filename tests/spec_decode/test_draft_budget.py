"""The budget policy against cost curves made for it: what pays is chosen, noise changes nothing, load settles fast."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from specdec.plan import Candidate, LengthChoice
from specdec.spec_decode.draft_budget import (
    MOST_BLOCKS,
    AdaptiveBudget,
    BudgetSettings,
    Expectation,
    best_budget,
    row_buckets,
)

K = 7


def survivals(rate: float) -> tuple[float, ...]:
    return tuple(rate ** (k + 1) for k in range(K))


GOOD, BAD = survivals(0.92), survivals(0.2)


@dataclass
class Roofline:
    """A target that is free up to `free` rows and pays `per_row` beyond, a draft that costs `drafted`."""

    free: int = 64
    base: float = 5.0
    per_row: float = 0.05
    drafted: float = 1.0
    noise: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def target(self, _: int, rows: int) -> float:
        clean = self.base + self.per_row * max(rows - self.free, 0)
        return clean * (1 + self.noise * self.dice.uniform(-1, 1))

    def absorb(self, *_: int) -> float:
        return 0.1

    def draft(self, _: int) -> float:
        return self.drafted


def candidates(batch: int, cap: int = K, available: int | None = None) -> list[Candidate]:
    return [Candidate(cap if available is None else available, cap)] * batch


def fed(policy: AdaptiveBudget, survival: Sequence[float] = GOOD) -> AdaptiveBudget:
    """A policy that has seen many blocks with these survivals."""
    for _ in range(MOST_BLOCKS):
        policy.report(survival)
    for _ in range(policy.delay + 1):
        policy.choose([], [], 0)
    return policy


def test_row_buckets() -> None:
    assert row_buckets(1, 7) == (1, 2, 3, 4, 6, 8)
    assert row_buckets(4, 7) == (4, 6, 8, 12, 16, 24, 32)
    assert row_buckets(2, 1) == (2, 3, 4)
    assert row_buckets(1, 15)[-1] == 16


def test_expectation_by_hand() -> None:
    one = Expectation([[0.9, 0.5], [0.9, 0.5]], [2, 1], batch=2)  # two requests have a first draft, one a second
    assert [one(n) for n in (0, 1, 2, 3, 9)] == pytest.approx([2.0, 2.9, 3.8, 4.3, 4.3])


def test_rows_move_between_requests_not_between_steps() -> None:
    blocks = [[0.8, 0.7], [0.2, 0.1]]
    alone, together = Expectation(blocks, [1, 1], batch=1), Expectation(blocks, [2, 2], batch=2)
    assert [alone(n) for n in (0, 1, 2)] == pytest.approx([1.0, 1.5, 1.9])  # half of the steps have either block
    assert [together(n) for n in (0, 1, 2, 3, 4)] == pytest.approx([2.0, 2.8, 3.5, 3.7, 3.8])


def test_best_budget_looks_behind_a_step_of_the_cost() -> None:
    cost = {0: 1.0, 1: 1.8, 2: 1.8, 3: 1.8}.__getitem__
    assert best_budget([1, 1.9, 2.8, 3.6].__getitem__, [0, 1, 2, 3], cost) == (3, pytest.approx(3.6 / 1.8))
    assert best_budget(lambda _: 1.0, [0, 1, 2], lambda _: 1.0)[0] == 0  # nothing to gain: no rows


def test_everything_is_verified_while_rows_are_free() -> None:
    policy = fed(AdaptiveBudget(Roofline(), K))
    choice = policy.choose(candidates(4), [], 0)
    assert choice.drafting
    assert choice.budget == 4 * K


def test_few_rows_when_each_costs() -> None:
    policy = fed(AdaptiveBudget(Roofline(free=0, per_row=0.1, drafted=0.5), K), survivals(0.7))
    choice = policy.choose(candidates(128), [], 0)
    assert choice.drafting
    assert 0 < choice.budget < 128 * 4


def run(policy: AdaptiveBudget, batch: int, steps: int, survival: Sequence[float], accepts=None) -> list[LengthChoice]:
    """Steps of a batch whose blocks all have these survivals; `accepts`(verified) -> accepted, of each request."""
    found, drafted = [], False
    for _ in range(steps):
        choice = policy.choose(candidates(batch, available=K if drafted else 0), [], 0)
        if drafted and accepts is not None:
            verified = min(choice.budget // batch, K)
            for _ in range(batch):
                policy.observe(survival, verified, accepts(verified))
        drafted = choice.drafting
        if drafted:
            for _ in range(batch):
                policy.report(survival)
        found.append(choice)
    return found


def test_drafting_stops_where_it_does_not_pay_and_is_tried_again() -> None:
    policy = fed(AdaptiveBudget(Roofline(free=0, per_row=0.1), K, settings=BudgetSettings(probe_share=0.05)), BAD)
    choices = run(policy, 256, 300, BAD)
    drafting = [choice.drafting for choice in choices]
    assert 4 <= sum(drafting[50:]) <= 30
    tested = [later.budget for before, later in pairwise(choices) if before.drafting]
    assert max(tested[2:]) >= 256  # a probe verifies something, or nothing would be learnt from it


def test_a_probe_costs_no_more_than_its_share() -> None:
    cost = Roofline(free=0, per_row=0.1)
    choices = run(fed(AdaptiveBudget(cost, K), BAD), 256, 4000, BAD)[100:]
    spent = sum(
        cost.target(256, 256 + (choice.budget or 0)) + cost.absorb() + choice.drafting * cost.draft(256)
        for choice in choices
    )
    assert spent / len(choices) < 1.012 * (cost.target(256, 256) + cost.absorb())


def test_it_draws_the_right_conclusion_from_a_probe() -> None:
    """Acceptance rises while nothing is drafted: the next probe brings drafting back."""
    policy = fed(AdaptiveBudget(Roofline(free=0, per_row=0.02), K), BAD)
    run(policy, 64, 50, BAD)
    assert not policy.choice.drafting
    assert run(policy, 64, 400, GOOD)[-1].drafting


def test_survivals_wait_until_other_drafts_are_verified() -> None:
    """With a delay of 1, the budget of a step is the same whatever is reported of the drafts that it is for."""
    budgets = []
    for survival in (GOOD, BAD):
        cost, settings = Roofline(free=0, per_row=0.05, drafted=0.1), BudgetSettings(interval=1)
        policy = AdaptiveBudget(cost, K, delay=1, settings=settings)
        policy.choose(candidates(64, available=0), [], 0)
        for _ in range(64):
            policy.report(survival)
        budgets.append([policy.choose(candidates(64), [], 0).budget for _ in range(2)])
    assert budgets[0][0] == budgets[1][0]
    assert budgets[0][1] != budgets[1][1]


def test_caps_hold() -> None:
    policy = AdaptiveBudget(Roofline(), K)
    assert not policy.choose(candidates(3, cap=0), [], 0).drafting
    assert policy.choose([*candidates(2, cap=2), *candidates(1, cap=0)], [], 0).budget == 4
    assert policy.choose(candidates(2, available=0), [], 0).budget == 0


def test_requests_without_survivals_yet() -> None:
    policy = AdaptiveBudget(Roofline(), K)
    assert policy.choose([Candidate(0, K)], [Candidate(0, K)], 100).drafting


def test_no_requests_at_all() -> None:
    choice = AdaptiveBudget(Roofline(), K).choose([], [], 512)
    assert choice.budget == 0
    assert not choice.drafting


def test_a_head_that_promises_too_much_is_not_believed_for_long() -> None:
    policy = fed(AdaptiveBudget(Roofline(free=0, per_row=0.1), K))
    choices = run(policy, 64, 200, GOOD, accepts=lambda _: 0)
    assert choices[0].drafting
    assert sum(choice.drafting for choice in choices[60:]) <= 6
    assert policy.trust[0] < 0.2


def test_a_calibrated_head_keeps_its_trust() -> None:
    policy, dice = fed(AdaptiveBudget(Roofline(), K)), random.Random(4)

    def accepts(verified: int) -> int:
        return next((k for k in range(verified) if dice.random() > 0.92), verified)

    run(policy, 8, 300, GOOD, accepts)
    assert policy.trust == pytest.approx([1.0] * K, abs=0.12)


def test_noise_does_not_flip_the_choice() -> None:
    """Costs that jitter by 2 % around curves where several budgets are about equally good."""
    policy = fed(AdaptiveBudget(Roofline(free=16, per_row=0.08, drafted=0.5, noise=0.02), K), survivals(0.8))
    choices = run(policy, 16, 400, survivals(0.8))
    assert sum(a != b for a, b in pairwise(choices[20:])) <= 4


def test_a_step_of_load_settles_in_under_twenty_steps() -> None:
    """1 to 64 requests and back: the choice of the new load is reached, and kept, within 20 steps."""
    cost = Roofline(free=32, per_row=0.15, drafted=0.6)
    policy = fed(AdaptiveBudget(cost, K), survivals(0.75))
    for batch in (1, 64, 1):
        settled = run(fed(AdaptiveBudget(cost, K), survivals(0.75)), batch, 40, survivals(0.75))[-1]
        found = run(policy, batch, 60, survivals(0.75))
        assert all(choice == settled for choice in found[20:]), (batch, settled, found)
