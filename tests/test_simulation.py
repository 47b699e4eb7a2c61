"""The load simulation, where the right answer is known: the engine's policy never loses much to the best fixed K."""

import pytest

from benchmark.simulate_load import Arm, Model, arms, simulate
from specdec.agent.step_cost import Measurement, StepCost
from specdec.spec_decode.draft_budget import row_buckets

K = 7
BATCHES = (1, 4, 16, 64)


def memory_bound_until(free: int) -> StepCost:
    """A target of 5 ms up to `free` rows, then in proportion; a draft of 1 ms and a little for each request."""
    shapes = [(batch, rows) for batch in BATCHES for rows in row_buckets(batch, K)]
    return StepCost(
        Measurement(
            target={shape: 5.0 * max(1.0, shape[1] / free) for shape in shapes},
            absorb={shape: 0.1 + 0.001 * shape[1] for shape in shapes},
            draft={batch: 1.0 + 0.02 * batch for batch in BATCHES},
        ),
        stepwise=True,
    )


@pytest.mark.parametrize('bias', [0.0, 1.5], ids=['calibrated', 'overconfident'])
@pytest.mark.parametrize('rates', [(0.93, 0.99), (0.75, 0.93), (0.2, 0.8)], ids=['good', 'middling', 'bad'])
@pytest.mark.parametrize('concurrency', [1, 16, *(pytest.param(batch, marks=pytest.mark.slow) for batch in (4, 64))])
def test_adaptive_lengths_against_every_fixed_one(concurrency: int, rates: tuple[float, float], bias: float) -> None:
    cost, acceptance = memory_bound_until(96), Model(*rates, K, bias)
    speed = {}
    for arm in arms(cost, K):
        found = simulate(arm, acceptance, max(24, 3 * concurrency), 1, concurrency)
        speed[arm.name] = found.tokens / found.seconds
    fixed = max(value for name, value in speed.items() if name.startswith('fixed'))
    assert speed['adaptive'] > 0.97 * speed['plain']
    assert speed['adaptive'] > 0.97 * fixed
    assert speed['oracle'] >= 0.999 * fixed or speed['oracle'] >= 0.999 * speed['plain']


def test_the_simulation_counts_tokens() -> None:
    cost = memory_bound_until(96)
    plain = simulate(Arm('plain', cost, K, 'fixed', 0), Model(0.5, 0.9, K), 8, 2, 4)
    assert plain.verified == plain.accepted == 0
    assert plain.tokens <= 4 * plain.steps
    fixed = simulate(Arm('fixed', cost, K, 'fixed', 3), Model(0.999, 1.0, K, spread=0.0), 8, 2, 4)
    assert fixed.tokens / fixed.steps > 3 * plain.tokens / plain.steps


def test_a_request_rate_below_what_the_engine_can_do_is_kept_up_with() -> None:
    cost = memory_bound_until(96)
    found = simulate(Arm('plain', cost, K, 'fixed', 0), Model(0.5, 0.9, K), 50, 3, 64, rate=2.0)
    assert found.seconds == pytest.approx(50 / 2.0, rel=0.4)
