"""The device's record of a slot: what the host's records and a step's end write, and what they leave alone."""

from typing import Any

import pytest
import torch

from specdec.agent.state import (
    ANCHOR,
    CAP,
    END,
    LENGTH,
    MIN_P,
    NUM_DRAFTS,
    SEED,
    STOP_FROM,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SlotState,
)
from specdec.messages import MAX_BANNED_IDS, MAX_STOP_IDS, SamplingParams
from specdec.plan import Admit, PageUpdate, StepPlan
from specdec.spec_decode.rules import NO_ID

K = 3


def make_plan(**fields: Any) -> StepPlan:
    defaults = {'step': 1, 'admits': (), 'page_updates': (), 'chunks': (), 'decodes': ()}
    return StepPlan(**(defaults | {'row_bound': 0, 'table_width': 4, 'num_drafting': 0} | fields))


def make_state() -> SlotState:
    return SlotState(4, K, 6, 100, torch.device('cpu'))


def admit(slot: int, length: int = 0, **params: Any) -> Admit:
    return Admit(slot, length, end=20, stop_from=7, params=SamplingParams(10, **params))


def test_admit_writes_every_setting() -> None:
    state = make_state()
    params = {'temperature': 0.5, 'top_k': 4, 'top_p': 0.25, 'min_p': 0.125, 'seed': 9, 'max_drafts': 2}
    state.apply(make_plan(admits=(admit(2, 8, stop_ids=(5, 6), banned_ids=(1,), **params),)))
    ints = state.ints[2]
    assert [ints[c].item() for c in (LENGTH, END, STOP_FROM, SEED, TOP_K, CAP)] == [8, 20, 7, 9, 4, 2]
    assert [state.floats[2, c].item() for c in (TEMPERATURE, TOP_P, MIN_P)] == [0.5, 0.25, 0.125]
    assert state.stop_ids[2].tolist() == [5, 6] + [NO_ID] * (MAX_STOP_IDS - 2)
    assert state.banned_ids[2].tolist() == [1] + [NO_ID] * (MAX_BANNED_IDS - 1)
    assert state.ints[[0, 1, 3]].eq(0).all()


@pytest.mark.parametrize(('asked', 'cap'), [(None, K), (0, 0), (1, 1), (K, K), (99, K)])
def test_caps(asked: int | None, cap: int) -> None:
    state = make_state()
    state.apply(make_plan(admits=(admit(1, max_drafts=asked),)))
    assert state.ints[1, CAP].item() == cap


@pytest.mark.parametrize('seed', [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_seed_keeps_its_64_bits(seed: int) -> None:
    state = make_state()
    state.apply(make_plan(admits=(admit(1, seed=seed),)))
    assert state.ints[1, SEED].item() % 2**64 == seed


def test_a_new_tenant_inherits_nothing() -> None:
    state, slot = make_state(), torch.tensor([1])
    settings = {'stop_ids': (5, 6, 7), 'banned_ids': (3,), 'temperature': 1.0, 'top_k': 3}
    state.apply(make_plan(admits=(admit(1, 4, **settings),), page_updates=(PageUpdate(1, 0, (9, 8, 7)),)))
    state.advance(slot, torch.tensor([6]), torch.tensor([33]), torch.tensor([[1, 2, 3]]))
    state.apply(make_plan(admits=(admit(1),), page_updates=(PageUpdate(1, 0, (5,)),)))
    assert state.ints[1].tolist() == [0, 0, 0, K, 20, 7, 0, 0, 0]
    assert state.page_table[1].tolist() == [5, 0, 0, 0, 0, 0]
    assert state.stop_ids[1].eq(NO_ID).all()
    assert state.banned_ids[1].eq(NO_ID).all()
    assert state.floats[1, TEMPERATURE] == 0


def test_page_updates_extend_a_table() -> None:
    state = make_state()
    state.apply(make_plan(page_updates=(PageUpdate(1, 0, (4, 5)), PageUpdate(2, 0, (6,)))))
    state.apply(make_plan(page_updates=(PageUpdate(1, 2, (9,)),)))
    assert state.page_table[1].tolist() == [4, 5, 9, 0, 0, 0]
    assert state.page_table[2].tolist() == [6, 0, 0, 0, 0, 0]


def test_records_apply_in_order_when_a_slot_changes_hands_in_one_plan() -> None:
    """The tenant comes first, whatever order the scheduler wrote its pages in."""
    state = make_state()
    state.apply(make_plan(page_updates=(PageUpdate(1, 0, (4, 5)),)))
    state.apply(make_plan(admits=(admit(1),), page_updates=(PageUpdate(1, 0, (2,)), PageUpdate(1, 1, (3,)))))
    assert state.page_table[1].tolist() == [2, 3, 0, 0, 0, 0]


def test_advance() -> None:
    state = make_state()
    slots, drafts = torch.tensor([3, 1]), torch.tensor([[1, 2, 3], [4, 5, 6]])
    state.apply(make_plan(admits=(admit(1, seed=4), admit(3, seed=5))))
    state.advance(slots, torch.tensor([7, 8]), torch.tensor([70, 80]), drafts)
    assert state.ints[3, [LENGTH, ANCHOR, NUM_DRAFTS, SEED]].tolist() == [7, 70, K, 5]
    assert state.ints[1, [LENGTH, ANCHOR, NUM_DRAFTS, SEED]].tolist() == [8, 80, K, 4]
    assert state.drafts[slots].tolist() == drafts.tolist()
    assert state.ints[2].eq(0).all()


def test_advance_without_a_block_forgets_the_old_drafts() -> None:
    state, slot = make_state(), torch.tensor([1])
    state.advance(slot, torch.tensor([7]), torch.tensor([70]), torch.tensor([[1, 2, 3]]))
    state.advance(slot, torch.tensor([8]), torch.tensor([71]), None)
    assert state.ints[1, [LENGTH, ANCHOR, NUM_DRAFTS]].tolist() == [8, 71, 0]


def test_commit_moves_the_length_alone() -> None:
    state, slots = make_state(), torch.tensor([2, 3])
    state.apply(make_plan(admits=(admit(2, seed=4), admit(3, seed=5))))
    before = state.ints.clone()
    state.commit(slots, torch.tensor([5, 6]))
    before[2, LENGTH], before[3, LENGTH] = 5, 6
    assert torch.equal(state.ints, before)
