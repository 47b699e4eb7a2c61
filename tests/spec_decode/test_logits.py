"""The law of a pick, the order and meaning of the filters, and bans: on rows whose right answer is known by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.filter_threshold import Filters, filter_threshold
from specdec.messages import SamplingParams
from specdec.plan import NO_STAGE, Stage
from specdec.spec_decode.logits import LogitRows, Sampling, pick_tokens, process
from tests.helpers.exactness import decide, survivors
from tests.helpers.statistics import chi_square_p

ALL = Stage.NOISE | Stage.FILTERS | Stage.BANS
DRAWS = 40_000
LAW = torch.tensor([0.05, 0.3, 0.02, 0.22, 0.08, 0.15, 0.01, 0.17])  # adds up to 1
LOGITS = LAW.log() + 3.0


def settings_of(*requests: SamplingParams, stop_from: int = 0) -> Sampling:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(r, name) for r in requests], dtype=dtype)

    def ids(name: str) -> Tensor:
        return torch.tensor([(*getattr(r, name), *(-1,) * (4 - len(getattr(r, name)))) for r in requests])

    return Sampling(
        slots=torch.arange(len(requests)),
        seeds=column('seed', torch.int64),
        top_k=column('top_k', torch.int64),
        stop_from=torch.tensor([stop_from + r.min_new_tokens for r in requests]),
        end=torch.full((len(requests),), 10**9),
        draft_sampling=torch.zeros(len(requests), dtype=torch.int64),
        temperature=column('temperature', torch.float32),
        top_p=column('top_p', torch.float32),
        min_p=column('min_p', torch.float32),
        stop_ids=ids('stop_ids'),
        banned_ids=ids('banned_ids'),
    )


def picked(logits: Tensor, requests: Tensor, positions: Tensor, sampling: Sampling, stages: Stage) -> Tensor:
    """Picks of rows without drafts in front of them."""
    count = len(sampling.seeds)
    nothing = torch.zeros(count, 0, dtype=torch.int64)
    zeros = torch.zeros(count + 1, dtype=torch.int64)
    rows = LogitRows(requests, zeros, positions, nothing, zeros[1:])
    return pick_tokens(process(logits, rows, sampling, None, stages), rows, sampling)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=9, **{'temperature': 1.0, **changes})


def draw(logits: Tensor, count: int = DRAWS, **changes: Any) -> Tensor:
    """Tokens drawn from one row of logits at `count` positions, all for one seed."""
    sampling = settings_of(params(**{'seed': 1234, **changes}))
    positions = torch.arange(count)
    return picked(logits.expand(count, -1), torch.zeros(count, dtype=torch.int64), positions, sampling, ALL)


def kept(logits: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    filters = Filters(torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    cut = filter_threshold(logits[None], torch.ones(1), filters)
    return torch.nonzero(logits >= cut.view(-1)).flatten().tolist()


# ------------------------------------------------------------------------------------------------------- the law
HAND = {  # what is left of LAW, by hand: ids and their weights
    'plain': ({}, LAW.tolist()),
    'cold': ({'temperature': 0.5}, (LAW**2).tolist()),
    'hot': ({'temperature': 2.0}, (LAW**0.5).tolist()),
    'top_k': ({'top_k': 3}, [0, 0.3, 0, 0.22, 0, 0, 0, 0.17]),
    'top_p': ({'top_p': 0.6}, [0, 0.3, 0, 0.22, 0, 0, 0, 0.17]),  # 0.30 + 0.22 = 0.52 is not yet enough
    'min_p': ({'min_p': 0.45}, [0, 0.3, 0, 0.22, 0, 0.15, 0, 0.17]),  # at least 0.135
    # of the best four (0.84) the renormalised 0.357, 0.262 and 0.202 reach 0.8; not renormalised, all four would stay
    'top_k and top_p': ({'top_k': 4, 'top_p': 0.8}, [0, 0.3, 0, 0.22, 0, 0, 0, 0.17]),
    'temperature and min_p': ({'temperature': 0.5, 'min_p': 0.3}, [0, 0.09, 0, 0.0484, 0, 0, 0, 0.0289]),
    'all': (
        {'temperature': 0.5, 'top_k': 6, 'top_p': 0.9, 'min_p': 0.3},
        [0, 0.09, 0, 0.0484, 0, 0, 0, 0.0289],
    ),
}


@pytest.mark.parametrize('name', HAND)
def test_draws_follow_the_law(name: str) -> None:
    changes, weights = HAND[name]
    assert chi_square_p(draw(LOGITS, **changes), torch.tensor(weights)) > 1e-3


@pytest.mark.parametrize('name', HAND)
def test_a_bias_of_two_percent_is_found(name: str) -> None:
    """The same test on draws of which one in fifty was replaced by one fixed id."""
    changes, weights = HAND[name]
    draws = draw(LOGITS, **changes)
    draws[::50] = int(torch.tensor(weights).argmax())
    assert chi_square_p(draws, torch.tensor(weights)) < 1e-3


def test_draws_follow_the_law_over_seeds_too() -> None:
    requests = [params(seed=7919 * i + 1) for i in range(DRAWS // 4)]
    rows = torch.arange(len(requests))
    tokens = picked(LOGITS.expand(len(rows), -1), rows, torch.full_like(rows, 17), settings_of(*requests), ALL)
    assert chi_square_p(tokens, LAW) > 1e-3


def test_neighbouring_positions_are_independent() -> None:
    tokens = draw(LOGITS)
    pairs = tokens[0::2] * len(LAW) + tokens[1::2]
    assert chi_square_p(pairs, torch.outer(LAW, LAW).flatten()) > 1e-3


def test_temperatures_differ_by_more_than_chance() -> None:
    assert chi_square_p(draw(LOGITS, temperature=1.1), LAW) < 1e-3


# -------------------------------------------------------------------------------------------------- the filters
def test_what_equals_the_last_kept_value_is_kept() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 0.5, 2.0])
    assert kept(logits, top_k=1) == [1, 2, 4]
    assert kept(logits, top_k=4) == [0, 1, 2, 4]
    assert kept(logits, top_p=0.3) == [1, 2, 4]
    even = torch.zeros(8)
    assert kept(even, top_k=2) == kept(even, top_p=0.1) == kept(even, min_p=1.0) == list(range(8))


def test_each_filter_acts_on_the_survivors_of_the_one_before() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept(logits, top_p=0.69) == [0, 1]
    assert kept(logits, top_k=3, top_p=0.75) == [0, 1]  # 0.444 + 0.333 of three
    assert kept(logits, top_p=0.75) == [0, 1, 2]


def test_filters_that_filter_nothing() -> None:
    """The long tail of a large vocabulary survives, whoever else is filtered in the batch."""
    generator = torch.Generator().manual_seed(3)
    for scale in (1.0, 5.0, 20.0):
        logits = torch.randn(50_000, generator=generator) * scale
        assert len(kept(logits)) == len(logits)
        assert len(kept(logits, top_k=50_000)) == len(logits)
        assert len(kept(logits, top_k=60_000)) == len(logits)


def test_the_best_token_always_survives() -> None:
    logits = torch.tensor([-3.0, 5.0, 1.0])
    assert kept(logits, top_k=1) == kept(logits, top_p=1e-6) == kept(logits, min_p=1.0) == [1]


@given(
    seed=st.integers(0, 10**6),
    top_k=st.integers(0, 12),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    coarse=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_filters_equal_the_rule_written_out(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float, coarse: bool
) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(seed)) * 2
    if coarse:  # with many ties
        logits = logits.round()
    logp, closest = survivors(logits, params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    found = kept(logits / temperature, top_k, top_p, min_p)
    assert found == torch.nonzero(logp.isfinite()).flatten().tolist() or closest < 1e-6


def test_the_pick_is_the_best_noisy_survivor() -> None:
    """Row by row against the rule written out, with requests that all differ."""
    generator = torch.Generator().manual_seed(5)
    kinds = [{}, {'temperature': 0.0}, {'temperature': 0.3, 'top_k': 4}, {'top_p': 0.5}, {'min_p': 0.2, 'top_k': 9}]
    requests = [params(seed=100 + i, **kind) for i, kind in enumerate(kinds * 3)]
    owners = torch.randint(0, len(requests), (200,), generator=generator)
    logits = torch.randn(200, 30, generator=generator) * 3
    positions = torch.arange(200)
    picks = picked(logits, owners, positions, settings_of(*requests), ALL)
    for row in range(200):
        expected = decide(logits[row], row, 0, replace(requests[owners[row]], min_new_tokens=0))
        assert int(picks[row]) == expected.pick or expected.margin < 1e-5 or expected.cut < 1e-6


# --------------------------------------------------------------------------------------------- greedy, bans, ties
def test_greedy_takes_the_lower_of_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [7.0, 7.0, 7.0]])
    rows = torch.tensor([0, 0])
    greedy = settings_of(params(temperature=0.0))
    for stages in (ALL, NO_STAGE, Stage.NOISE):
        assert picked(logits, rows, rows, greedy, stages).tolist() == [1, 0]


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_bans(temperature: float) -> None:
    logits = torch.tensor([9.0, 8.0, 7.0, 6.0]).expand(400, -1)
    rows, positions = torch.zeros(400, dtype=torch.int64), torch.arange(400)
    request = params(temperature=temperature, banned_ids=(0,), stop_ids=(1, 2), min_new_tokens=100)
    picks = picked(logits, rows, positions, settings_of(request, stop_from=50), ALL)
    assert set(picks[:150].tolist()) == {3}
    assert 1 in picks[150:].tolist()
    assert 0 not in picks.tolist()


def test_bans_leave_the_callers_logits_alone() -> None:
    logits = torch.zeros(1, 4)
    picked(logits, torch.tensor([0]), torch.tensor([0]), settings_of(params(banned_ids=(2,))), ALL)
    assert logits.tolist() == [[0.0] * 4]


def test_filters_see_no_banned_token() -> None:
    """A ban comes first: the best two are the best two of what is left."""
    tokens = draw(torch.tensor([9.0, 8.0, 7.9, 7.8]), 2000, banned_ids=(0,), top_k=2)
    assert set(tokens.tolist()) == {1, 2}


def test_seeds_are_64_bits() -> None:
    high, low = params(seed=-(2**63)), params(seed=0)
    rows = torch.zeros(500, dtype=torch.int64)
    first, second = (picked(LOGITS.expand(500, -1), rows, torch.arange(500), settings_of(p), ALL) for p in (high, low))
    assert (first != second).float().mean() > 0.5


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0], [-math.inf, 0.0, -math.inf]])
    both = settings_of(params(temperature=0.01, top_p=0.9, top_k=2, min_p=0.1))
    assert picked(logits, torch.tensor([0, 0]), torch.tensor([0, 1]), both, ALL).tolist() == [0, 1]
