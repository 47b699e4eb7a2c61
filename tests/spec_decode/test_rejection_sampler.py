"""The verdict on hand-made rows: what is accepted, where it ends and why, and that no draft bends the law."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.plan import NO_STAGE
from specdec.spec_decode.logits import LogitRows
from specdec.spec_decode.rejection_sampler import FULL, RUNNING, STOPPED, Verdict, emitted_logprobs, verify
from tests.helpers.statistics import chi_square_p
from tests.spec_decode.test_logits import ALL, LAW, LOGITS, params, settings_of

GREEDY = NO_STAGE
V = 50


def judge(
    picks: list[list[int]],
    drafts: list[list[int]],
    stop_ids: tuple[int, ...] = (),
    room: int | list[int] = 1000,
    first: int = 10,
) -> Verdict:
    """One request per row: what the target picks after 0, 1, ... accepted drafts; a row's length is 1 + verify length.

    Rows of the packed logits are one-hot at the picks. `room`: tokens each request may still emit.
    """
    counts = [len(row) for row in picks]
    flat = torch.tensor([token for row in picks for token in row])
    logits = torch.nn.functional.one_hot(flat, V).float()
    requests = torch.repeat_interleave(torch.arange(len(picks)), torch.tensor(counts))
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
    steps = torch.cat([torch.arange(n) for n in counts])
    sampling = settings_of(*[params(temperature=0.0, stop_ids=stop_ids)] * len(picks))
    rooms = torch.tensor(room if isinstance(room, list) else [room] * len(picks))
    width = max(len(d) for d in drafts)
    padded = torch.tensor([d + [V - 1] * (width - len(d)) for d in drafts]).view(len(drafts), width)
    rows = LogitRows(requests, offsets, first + steps, padded, torch.tensor(counts) - 1)
    return verify(logits, rows, replace(sampling, end=first + rooms), GREEDY)


def emitted(verdict: Verdict, request: int = 0) -> list[int]:
    return verdict.tokens[request, : verdict.counts[request]].tolist()


def test_longest_prefix_and_the_correction() -> None:
    verdict = judge([[5, 6, 7, 8]], [[5, 6, 9]])
    assert emitted(verdict) == [5, 6, 7]
    assert (verdict.committed.tolist(), verdict.next_tokens.tolist()) == ([3], [7])
    assert verdict.finish.tolist() == [RUNNING]


def test_all_accepted_gives_a_bonus_and_none_the_correction() -> None:
    assert emitted(judge([[5, 6, 7, 8]], [[5, 6, 7]])) == [5, 6, 7, 8]
    assert emitted(judge([[5, 6, 7, 8]], [[1, 6, 7]])) == [5]  # what is right behind a wrong one does not count
    assert emitted(judge([[5]], [[5, 6, 7]])) == [5]  # verify length 0


def test_drafts_behind_the_verify_length_are_not_accepted() -> None:
    """They have no row, although they may equal what the last row picks."""
    assert emitted(judge([[5, 6]], [[5, 6, 6]])) == [5, 6]
    assert emitted(judge([[6]], [[6, 6, 6]])) == [6]


def test_requests_do_not_mix() -> None:
    verdict = judge([[5, 6, 7], [5], [5, 6], [1, 2, 3]], [[5, 6], [5, 6], [4, 6], [1, 9]])
    assert [emitted(verdict, i) for i in range(4)] == [[5, 6, 7], [5], [5], [1, 2]]


# ------------------------------------------------------------------------------------------------------ the ends
def test_a_stop_beats_the_limit_at_the_same_token() -> None:
    """[10, 11, STOP, 20, 21, 22] with room for 3 or 5 and everything accepted: the stop ends it."""
    for room in (3, 4, 5, 100):
        verdict = judge([[10, 11, 2, 20, 21, 22]], [[10, 11, 2, 20, 21]], stop_ids=(2,), room=room)
        assert emitted(verdict) == [10, 11, 2]
        assert verdict.finish.tolist() == [STOPPED]


def test_the_limit_beats_a_stop_behind_it() -> None:
    verdict = judge([[10, 11, 2, 20]], [[10, 11, 2]], stop_ids=(2,), room=2)
    assert emitted(verdict) == [10, 11]
    assert verdict.finish.tolist() == [FULL]


def test_the_first_of_several_stops() -> None:
    verdict = judge([[10, 3, 2, 3]], [[10, 3, 2]], stop_ids=(2, 3))
    assert emitted(verdict) == [10, 3]


def test_a_stop_that_was_only_drafted_ends_nothing() -> None:
    assert judge([[10, 11]], [[2]], stop_ids=(2,)).finish.tolist() == [RUNNING]
    verdict = judge([[10, 11, 2]], [[9, 11]], stop_ids=(2,))  # picked on a row behind a rejection
    assert (emitted(verdict), verdict.finish.tolist()) == ([10], [RUNNING])


@pytest.mark.parametrize('position', range(4))
def test_a_stop_at_every_place_of_the_block(position: int) -> None:
    row = [10, 11, 12, 13]
    row[position] = 2
    verdict = judge([row], [row[:3]], stop_ids=(2,))
    assert emitted(verdict) == row[: position + 1]
    assert verdict.finish.tolist() == [STOPPED]


@pytest.mark.parametrize('room', range(1, 7))
def test_exactly_what_is_left(room: int) -> None:
    verdict = judge([[10, 11, 12, 13]], [[10, 11, 12]], room=room)
    assert len(emitted(verdict)) == min(room, 4)
    assert verdict.finish.tolist() == [FULL if room <= 4 else RUNNING]


def test_nothing_left_emits_nothing() -> None:
    """A request that ended in a step not read yet may have one more under way."""
    verdict = judge([[10], [10, 11]], [[], [10]], room=[0, 5])
    assert verdict.counts.tolist() == [0, 2]


@given(data=st.data(), k=st.integers(0, 5), stops=st.sets(st.integers(0, 5), max_size=2), room=st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_equals_one_token_at_a_time(data: Any, k: int, stops: set[int], room: int) -> None:
    picks = data.draw(st.lists(st.integers(0, 5), min_size=k + 1, max_size=k + 1))
    drafts = data.draw(st.lists(st.integers(0, 5), min_size=k, max_size=k))
    expected, reason = [], RUNNING
    for step in range(k + 1):
        expected.append(picks[step])
        if picks[step] in stops:
            reason = STOPPED
        elif len(expected) == room:
            reason = FULL
        if reason != RUNNING or step == k or drafts[step] != picks[step]:
            break
    verdict = judge([picks], [drafts], tuple(stops), room)
    assert (emitted(verdict), verdict.finish.tolist()) == (expected, [reason])
    assert int(verdict.next_tokens) == expected[-1] or reason != RUNNING


# ------------------------------------------------------------------------------------------------------- the law
def rounds(drafts: Tensor, count: int = 30_000, **changes: Any) -> Verdict:
    """Many verifications of one draft [1] per row on the same law, at different positions."""
    offsets = torch.arange(count + 1) * 2
    requests = torch.arange(2 * count) // 2
    positions = torch.arange(2 * count)
    sampling = settings_of(params(seed=77, **changes))
    each = {
        name: getattr(sampling, name).expand(count, *getattr(sampling, name).shape[1:])
        for name in (
            'slots',
            'draft_sampling',
            'seeds',
            'top_k',
            'stop_from',
            'end',
            'temperature',
            'top_p',
            'min_p',
            'stop_ids',
            'banned_ids',
        )
    }
    logits = LOGITS.expand(2 * count, -1)
    ones = torch.ones(count, dtype=torch.int64)
    rows = LogitRows(requests, offsets, positions, drafts[:, None], ones)
    return verify(logits, rows, replace(sampling, **each), ALL)


@pytest.mark.parametrize('kind', ['likely', 'unlikely', 'random', 'second best'])
def test_the_law_under_any_draft(kind: str) -> None:
    count = 30_000
    generator = torch.Generator().manual_seed(1)
    drafts = {
        'likely': torch.full((count,), int(LAW.argmax())),
        'unlikely': torch.full((count,), int(LAW.argmin())),
        'second best': torch.full((count,), int(LAW.topk(2).indices[1])),
        'random': torch.randint(0, len(LAW), (count,), generator=generator),
    }[kind]
    verdict = rounds(drafts)
    assert chi_square_p(verdict.tokens[:, 0], LAW) > 1e-3
    accepted = verdict.counts == 2
    assert torch.equal(accepted, verdict.tokens[:, 0] == drafts)
    assert chi_square_p(accepted.long(), torch.stack([1 - LAW[drafts].mean(), LAW[drafts].mean()])) > 1e-3
    assert chi_square_p(verdict.tokens[accepted, 1], LAW) > 1e-3


def test_a_biased_acceptance_is_found() -> None:
    """Accepting a draft two times in a hundred although it is not the pick fails the test above."""
    drafts = torch.full((30_000,), int(LAW.argmin()))
    tokens = rounds(drafts).tokens[:, 0].clone()
    tokens[::50] = drafts[::50]
    assert chi_square_p(tokens, LAW) < 1e-3


def test_no_token_outside_the_filter_on_any_row() -> None:
    """Filters act on every verified row, not on the bonus alone; drafts under the cut are never accepted."""
    drafts = torch.full((5000,), int(LAW.argmin()))
    verdict = rounds(drafts, 5000, top_k=2)
    assert set(verdict.tokens.flatten().tolist()) == set(LAW.topk(2).indices.tolist())
    assert verdict.counts.max() == 1
    assert rounds(drafts, 5000, min_p=0.2).counts.max() == 1


# --------------------------------------------------------------------------------------------------- logprobs
def test_logprobs_are_of_the_raw_logits_and_sorted() -> None:
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(2))
    ids = torch.tensor([3, 1, 4, 1, 5, 9])
    own, values, best = emitted_logprobs(logits, ids, 5)
    full = logits.double().log_softmax(-1)
    assert torch.allclose(own.double(), full[torch.arange(6), ids], atol=1e-6)
    assert torch.allclose(values.double(), full.sort(descending=True).values[:, :5], atol=1e-6)
    assert torch.equal(best, full.sort(descending=True).indices[:, :5])
    assert (own < 0).all()
    assert (values.exp().sum(-1) <= 1).all()


def test_no_alternatives() -> None:
    own, values, best = emitted_logprobs(torch.randn(3, 7), torch.tensor([0, 1, 2]), 0)
    assert own.shape == (3,)
    assert values.shape == best.shape == (3, 0)


def test_more_alternatives_than_the_vocabulary_has() -> None:
    _, values, _ = emitted_logprobs(torch.randn(3, 7), torch.tensor([0, 1, 2]), 20)
    assert values.shape == (3, 7)
