"""Cost tables: monotone, defined everywhere, deaf to outliers, and the same after a dump."""

import random
from pathlib import Path

import pytest

from specdec.agent.step_cost import Curve, Measurement, StepCost, measure


def test_between_beyond_and_below() -> None:
    curve = Curve({4: 2.0, 8: 4.0, 16: 5.0}, stepwise=False)
    assert [curve(n) for n in (1, 4, 6, 8, 12, 16, 32)] == [2.0, 2.0, 3.0, 4.0, 4.5, 5.0, 7.0]
    assert Curve({4: 2.0}, stepwise=False)(8) == 4.0


def test_steps() -> None:
    curve = Curve({4: 2.0, 8: 4.0, 16: 5.0}, stepwise=True)
    assert [curve(n) for n in (1, 4, 5, 8, 9, 16)] == [2.0, 2.0, 4.0, 4.0, 5.0, 5.0]


def test_monotone_whatever_is_measured() -> None:
    curve = Curve({1: 3.0, 2: 1.0, 4: 2.0, 8: 5.0}, stepwise=False)
    for _ in range(40):
        curve.observe(4, 0.5)
    values = [curve(n) for n in range(1, 40)]
    assert values == sorted(values)


def test_a_cell_follows_its_median_and_no_outlier() -> None:
    curve, dice = Curve({4: 2.0, 8: 4.0}, stepwise=True), random.Random(1)
    for _ in range(100):
        curve.observe(8, 1000.0 if dice.random() < 0.2 else dice.gauss(5.0, 0.05))
    assert curve(8) == pytest.approx(5.0, abs=0.05)


def test_cells_that_nobody_runs_move_along() -> None:
    curve = Curve({4: 2.0, 8: 4.0, 16: 6.0}, stepwise=True)
    for _ in range(9):
        curve.observe(8, 6.0)  # half as long again: longer contexts, or a slower clock
    assert [curve(n) for n in (4, 8, 16)] == [3.0, 6.0, 9.0]


def table() -> StepCost:
    return StepCost(
        Measurement(
            target={(1, 1): 4.0, (1, 8): 5.0, (4, 4): 5.0, (4, 32): 8.0},
            absorb={(1, 1): 0.5, (1, 8): 0.6, (4, 4): 0.6, (4, 32): 0.9},
            draft={1: 1.0, 4: 1.5},
        ),
        stepwise=True,
    )


def test_batches_between_buckets_cost_the_larger_one_padding_included() -> None:
    cost = table()
    assert cost.target(1, 1) == 4.0
    assert cost.target(2, 2) == 5.0  # runs as 4 requests with 4 rows
    assert cost.target(2, 3) == 8.0  # 3 rows and 2 of padding are more than 4
    assert cost.draft(2) == 1.5
    assert cost.target(9, 99) > 8.0


def test_refined_by_real_steps() -> None:
    cost = table()
    for _ in range(9):
        cost.observe(3, 3, 7.0, 2.4, drafting=True)
    assert cost.target(4, 4) == 7.0
    assert cost.draft(4) == pytest.approx(1.8)  # 2.4 less what absorbing 4 rows costs
    for _ in range(9):
        cost.observe(3, 3, 7.0, 0.7, drafting=False)
    assert cost.absorb(4, 4) == 0.7


def test_the_same_after_a_dump(tmp_path: Path) -> None:
    cost = table()
    cost.observe(4, 32, 9.0, 2.5, drafting=True)
    cost.dump(tmp_path / 'cost.json')
    again = StepCost.load(tmp_path / 'cost.json')
    assert again.describe() == cost.describe()
    assert [again.target(b, r) for b, r in ((1, 5), (3, 20), (8, 64))] == [
        cost.target(b, r) for b, r in ((1, 5), (3, 20), (8, 64))
    ]


def test_measuring_takes_medians() -> None:
    times = {(1, False): [9.0, 1.0, 1.1], (1, True): [3.0, 2.0, 50.0], (2, False): [1.0] * 3, (2, True): [4.0] * 3}

    def run(batch: int, rows: int, drafting: bool) -> tuple[float, float]:
        assert rows == batch
        ms = times[batch, drafting].pop()
        return ms, ms

    found = measure(run, [(1, 1), (2, 2)], repeats=3)
    assert found.target == {(1, 1): 1.1, (2, 2): 1.0}
    assert found.draft == {1: pytest.approx(1.9), 2: 3.0}
