import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.spec_decode.draft_budget import PRIOR_ACCEPTANCE, best_budget
from specdec.spec_decode.verify_length import AcceptanceHistory, admit, early_stopped, fixed, threshold


def lengths(num_drafts: int, cap: int, room: int) -> int:
    return int(fixed(*(torch.tensor([x]) for x in (num_drafts, cap, room)))[0])


def test_every_draft_up_to_the_cap() -> None:
    assert lengths(7, 7, 100) == 7
    assert lengths(7, 3, 100) == 3
    assert lengths(7, 0, 100) == 0
    assert lengths(0, 7, 100) == 0  # nobody drafted in the step before


def test_a_step_emits_one_more_than_it_accepts() -> None:
    assert [lengths(4, 4, room) for room in range(1, 8)] == [0, 1, 2, 3, 4, 4, 4]


def test_never_negative() -> None:
    assert lengths(4, 4, 0) == 0  # a request that ended in a step that the host has not read


def test_each_request_has_its_own() -> None:
    found = fixed(torch.tensor([4, 4, 0, 4]), torch.tensor([4, 1, 4, 4]), torch.tensor([9, 9, 9, 3]))
    assert found.tolist() == [4, 1, 0, 2]


# --------------------------------------------------------------------------------------------------- threshold
def test_up_to_the_first_draft_below_the_threshold() -> None:
    confidences = torch.tensor([[0.9, 0.8, 0.4, 0.9], [0.4, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.9], [0.5, 0.5, 0.1, 0]])
    found = threshold(torch.tensor([4, 4, 2, 4]), confidences.cumprod(1), 0.5)
    assert found.tolist() == [2, 0, 2, 2]  # per draft, not cumulative; never more than there are


def test_nothing_survives_behind_a_survival_of_zero() -> None:
    assert threshold(torch.tensor([3]), torch.tensor([[0.9, 0.0, 0.0]]), 0.5).tolist() == [1]


# --------------------------------------------------------------------------------------------------- admission
def admitted_by_hand(available: list[int], survival: list[list[float]], budget: int) -> list[int]:
    chances = sorted((-s, k, r) for r, row in enumerate(survival) for k, s in enumerate(row[: available[r]]) if s > 0)
    lengths = [0] * len(survival)
    for _, _, request in chances[:budget]:
        lengths[request] += 1
    return lengths


def admitted(available: list[int], survival: list[list[float]], budget: int) -> list[int]:
    return admit(torch.tensor(available), torch.tensor(survival), torch.tensor([budget])).tolist()


@given(data=st.data())
def test_the_likeliest_drafts_are_admitted(data: st.DataObject) -> None:
    num_requests, num_drafts = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 7))
    grades = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])  # with ties
    rows = st.lists(grades, min_size=num_drafts, max_size=num_drafts)
    survival = [torch.tensor(data.draw(rows)).cumprod(0).tolist() for _ in range(num_requests)]
    available = data.draw(st.lists(st.integers(0, num_drafts), min_size=num_requests, max_size=num_requests))
    budget = data.draw(st.integers(0, num_requests * num_drafts + 3))
    found = admitted(available, survival, budget)
    assert found == admitted_by_hand(available, survival, budget)
    assert sum(found) <= budget


def test_equal_survivals_by_position_then_place() -> None:
    half = [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]
    assert [admitted([2, 2, 2], half, n) for n in (1, 3, 4)] == [[1, 0, 0], [1, 1, 1], [2, 1, 1]]


def test_a_draft_is_never_admitted_before_the_one_in_front_of_it() -> None:
    assert admitted([2, 2], [[0.1, 0.9], [0.5, 0.4]], 2) == [0, 2]  # survivals that rise count as their minimum


# ------------------------------------------------------------------------- why current confidences may not set budgets
def law_of_first_token(rule: Callable[[list[list[float]]], list[int]], count: int = 40_000) -> float:
    """The paper's Appendix A: how often A is emitted where p(A) = 0.7, q(A) = 0.5, and the confidence behind A is 0.9
    and behind B 0.
    """
    dice, found = random.Random(1), 0
    for _ in range(count):
        draft_is_a = dice.random() < 0.5
        [length] = rule([[0.8, 0.9 if draft_is_a else 0.0]])
        if length == 0:
            found += dice.random() < 0.7
        else:
            found += draft_is_a or dice.random() >= 0.3 / 0.5  # a rejected B becomes A: all that p has beyond q
    return found / count


STEPS_PER_SECOND = {1: 1.0, 2: 0.5, 3: 0.45}


def retrospective(confidences: list[list[float]]) -> list[int]:
    """The best length for the current confidences, each looked at: what must not be done."""
    survivals = torch.tensor(confidences).cumprod(1)[0].tolist()
    expected = [1.0, 1 + survivals[0], 1 + sum(survivals)]
    budget, _ = best_budget(expected.__getitem__, [0, 1, 2], lambda b: 1 / STEPS_PER_SECOND[1 + b])
    return [budget]


def test_a_search_that_looks_at_later_confidences_is_biased() -> None:
    assert law_of_first_token(retrospective) == pytest.approx(0.85, abs=0.01)


def test_stopping_early_or_an_older_budget_is_not() -> None:
    assert early_stopped([[0.8, 0.9]], STEPS_PER_SECOND.__getitem__) == [0]
    assert law_of_first_token(lambda c: early_stopped(c, STEPS_PER_SECOND.__getitem__)) == pytest.approx(0.7, abs=0.01)
    for budget in (0, 1, 2):

        def older(confidences: list[list[float]], budget: int = budget) -> list[int]:
            return admitted([2], torch.tensor(confidences).cumprod(1).tolist(), budget)

        assert law_of_first_token(older, 4000) == pytest.approx(0.7, abs=0.03)


def test_early_stopping_by_hand() -> None:
    rate = {2: 1.0, 3: 0.8, 4: 0.7, 5: 0.65, 6: 0.1}.__getitem__
    # 2 tokens at 1.0; 2.9 at 0.8 = 2.32; 3.71 at 0.7 = 2.6; 4.2 at 0.65 = 2.73; 4.5 at 0.1
    assert early_stopped([[0.9, 0.9, 0.4], [0.5, 0.5, 0.5]], rate) == [2, 1]


# ----------------------------------------------------------------------------------------------------- history
def test_history_counts_only_tests_that_were_reached() -> None:
    history = AcceptanceHistory.allocate(3, 4, torch.device('cpu'))
    slots = torch.tensor([1, 2])
    history.observe(slots, torch.tensor([4, 2]), torch.tensor([1, 2]))
    assert history.tested[1].tolist() == [1, 1, 0, 0]  # draft 2 was rejected, 3 and 4 never tested
    assert history.passed[1].tolist() == [1, 0, 0, 0]
    assert history.tested[2].tolist() == history.passed[2].tolist() == [1, 1, 0, 0]
    assert history.tested[0].tolist() == [2, 2, 0, 0]  # the engine's own


def test_history_leaves_padding_alone_and_forgets_a_tenant() -> None:
    history = AcceptanceHistory.allocate(3, 2, torch.device('cpu'))
    history.observe(torch.tensor([1, 0, 0]), torch.tensor([2, 2, 2]), torch.tensor([2, 0, 0]))
    assert history.tested[0].tolist() == [1, 1]
    history.forget(1)
    assert not history.tested[1].any()
    assert history.tested[0].tolist() == [1, 1]


def test_survival_moves_from_the_engines_mean_to_the_requests_own() -> None:
    history = AcceptanceHistory.allocate(3, 2, torch.device('cpu'))
    slot = torch.tensor([1])
    before = history.survival(torch.tensor([2]))
    assert before.tolist() == [[PRIOR_ACCEPTANCE, PRIOR_ACCEPTANCE**2]]
    for _ in range(60):
        history.observe(slot, torch.tensor([2]), torch.tensor([1]))
    first, second = history.survival(slot)[0].tolist()
    assert first > 0.95
    assert second < 0.1
    stranger = history.survival(torch.tensor([2]))[0].tolist()
    assert stranger[0] > 0.9  # the engine's mean is all that is known of it
    assert stranger[1] < 0.2
