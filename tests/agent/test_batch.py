"""Packing: which rows a step has, where they are written, and which of them draw a token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from specdec.agent.batch import Batch, decode_batch, mixed_batch
from specdec.agent.state import SlotState
from specdec.messages import SamplingParams
from specdec.plan import Admit, Chunk, PageUpdate, Stage, StepPlan
from specdec.spec_decode.verify_length import fixed

K, PAGE, WIDTH, END = 3, 4, 6, 20
STAGES = Stage.NOISE | Stage.BANS


@dataclass(frozen=True)
class Decoding:
    """A request in the middle of decoding: its anchor is 100 * slot, its drafts follow by 1, 2, 3."""

    slot: int
    length: int
    drafts: bool = True
    cap: int | None = None
    end: int = END


def make_state(decoding: Sequence[Decoding], chunks: Sequence[Chunk] = ()) -> SlotState:
    """Request in slot s has pages 10 s, 10 s + 1, ... as far as its end."""
    state = SlotState(8, K, WIDTH, 100, torch.device('cpu'))
    admits = [Admit(d.slot, 0, d.end, 0, SamplingParams(10, max_drafts=d.cap, seed=d.slot)) for d in decoding]
    admits += [Admit(c.slot, c.start, END, 0, SamplingParams(10, seed=c.slot)) for c in chunks]
    pages = [PageUpdate(a.slot, 0, tuple(range(10 * a.slot, 10 * a.slot + -(-a.end // PAGE)))) for a in admits]
    state.apply(make_plan(admits=tuple(admits), page_updates=tuple(pages)))
    for d in decoding:
        drafts = torch.tensor([[100 * d.slot + k + 1 for k in range(K)]]) if d.drafts else None
        state.advance(torch.tensor([d.slot]), torch.tensor([d.length]), torch.tensor([100 * d.slot]), drafts)
    return state


def make_plan(chunks: Sequence[Chunk] = (), decoding: Sequence[Decoding] = (), **fields: Any) -> StepPlan:
    return StepPlan(
        **{
            'step': 1,
            'admits': (),
            'page_updates': (),
            'chunks': tuple(chunks),
            'decodes': tuple(d.slot for d in decoding),
            'row_bound': (K + 1) * len(decoding),
            'table_width': WIDTH,
            'num_drafting': 0,
            **fields,
        }
    )


def entry(slot: int, position: int) -> int:
    return (10 * slot + position // PAGE) * PAGE + position % PAGE


def decode(decoding: Sequence[Decoding], num_rows: int | None = None) -> Batch:
    slots = torch.tensor([d.slot for d in decoding])
    return decode_batch(make_state(decoding), slots, WIDTH, num_rows, PAGE, STAGES)


# ------------------------------------------------------------------------------------------------- verify lengths
@pytest.mark.parametrize(
    ('drafts', 'cap', 'room', 'expected'),
    [(3, 3, 9, 3), (0, 3, 9, 0), (3, 0, 9, 0), (3, 2, 9, 2), (3, 3, 4, 3), (3, 3, 3, 2), (3, 3, 1, 0), (3, 3, 0, 0)],
)
def test_fixed_lengths(drafts: int, cap: int, room: int, expected: int) -> None:
    """A step emits one token more than it accepts, so as many as fit the room less one."""
    assert fixed(torch.tensor([drafts]), torch.tensor([cap]), torch.tensor([room])).item() == expected


def test_room_ends_at_the_request_limit() -> None:
    """With the anchor at END - 2 one token is left to emit: no draft can help."""
    lengths = [decode([Decoding(1, END - 1 - left)]).drawing.verify_lengths.item() for left in (1, 2, 3, 4, 5)]
    assert lengths == [0, 1, 2, 3, 3]


# --------------------------------------------------------------------------------------------------- decode steps
RAGGED = [Decoding(3, 5), Decoding(1, 9, cap=1), Decoding(4, 3, drafts=False), Decoding(2, 17)]


def test_decode_rows_are_packed_ragged() -> None:
    batch = decode(RAGGED)
    assert batch.drawing.verify_lengths.tolist() == [3, 1, 0, 1]
    assert batch.rows.layout.row_offsets.tolist() == [0, 4, 6, 7, 9]
    assert batch.rows.ids.tolist() == [300, 301, 302, 303, 100, 101, 400, 200, 201]
    assert batch.rows.positions.tolist() == [5, 6, 7, 8, 9, 10, 3, 17, 18]
    assert batch.rows.layout.contexts.tolist() == [5, 9, 3, 17]
    slots = [3] * 4 + [1] * 2 + [4] + [2] * 2
    assert batch.rows.slots.tolist() == [entry(s, p) for s, p in zip(slots, batch.rows.positions.tolist())]


def test_every_decode_row_draws_the_token_behind_it() -> None:
    batch = decode(RAGGED)
    assert batch.logit_rows is None
    assert batch.drawing.offsets.tolist() == batch.rows.layout.row_offsets.tolist()
    assert batch.drawing.requests.tolist() == [0] * 4 + [1] * 2 + [2] + [3] * 2
    assert batch.drawing.draw_positions.tolist() == [p + 1 for p in batch.rows.positions.tolist()]
    assert batch.sampling.seeds.tolist() == [3, 1, 4, 2]


@pytest.mark.parametrize('padding', [0, 1, 7])
def test_padding_rows_belong_to_nobody(padding: int) -> None:
    exact, padded = decode(RAGGED), decode(RAGGED, 9 + padding)
    for name in ('ids', 'positions', 'slots'):
        assert vars_of(padded.rows, name)[:9] == vars_of(exact.rows, name)
        assert vars_of(padded.rows, name)[9:] == [0] * padding
    assert padded.rows.layout.row_offsets.tolist() == exact.rows.layout.row_offsets.tolist()
    assert padded.drawing.offsets.tolist() == exact.drawing.offsets.tolist()
    assert padded.drawing.draw_positions.tolist()[:9] == exact.drawing.draw_positions.tolist()
    assert max(padded.drawing.requests.tolist()) < len(RAGGED)


def vars_of(rows: Any, name: str) -> list[int]:
    return {'ids': rows.ids, 'positions': rows.positions, 'slots': rows.slots}[name].tolist()


def test_padding_requests_use_slot_0() -> None:
    state = make_state(RAGGED[:1])
    batch = decode_batch(state, torch.tensor([3, 0, 0]), WIDTH, 6, PAGE, STAGES)
    assert batch.rows.layout.row_offsets.tolist() == [0, 4, 5, 6]
    assert batch.rows.slots.tolist()[4:] == [0, 0]
    assert batch.rows.positions.tolist()[4:] == [0, 0]


# ---------------------------------------------------------------------------------------------------- mixed steps
CHUNKS = [
    Chunk(5, 4, (7, 8, 9), final=False),
    Chunk(6, 0, (11, 12), final=True),
    Chunk(7, 8, (13,), final=True),
]


@pytest.mark.parametrize('pad', [False, True])
def test_mixed_rows(pad: bool) -> None:
    decoding = [Decoding(2, 6, cap=2), Decoding(1, 18)]
    state = make_state(decoding, CHUNKS)
    batch = mixed_batch(state, make_plan(CHUNKS, decoding), pad, PAGE, STAGES)
    real = 6 + 3 + 1
    assert batch.rows.ids.tolist()[:real] == [7, 8, 9, 11, 12, 13, 200, 201, 202, 100]
    assert batch.rows.positions.tolist()[:real] == [4, 5, 6, 0, 1, 8, 6, 7, 8, 18]
    slots = [5, 5, 5, 6, 6, 7, 2, 2, 2, 1]
    assert batch.rows.slots.tolist()[:real] == [entry(s, p) for s, p in zip(slots, batch.rows.positions.tolist())]
    assert len(batch.rows.ids) == (6 + 8 if pad else real)
    assert batch.rows.slots.tolist()[real:] == [0] * (len(batch.rows.ids) - real)
    layout = batch.rows.layout
    assert layout.row_offsets.tolist() == [0, 3, 5, 6, 9, 10]
    assert layout.contexts.tolist() == [4, 0, 8, 6, 18]
    assert layout.chunk_rows == (3, 2, 1)
    assert layout.tile_rows == K + 1
    assert layout.page_table[:, 0].tolist() == [50, 60, 70, 20, 10]


def test_only_final_chunks_and_decodes_draw() -> None:
    decoding = [Decoding(2, 6, cap=2), Decoding(1, 18)]
    batch = mixed_batch(make_state(decoding, CHUNKS), make_plan(CHUNKS, decoding), False, PAGE, STAGES)
    assert batch.num_absorbing == 1
    assert batch.slots.tolist() == [5, 6, 7, 2, 1]
    assert batch.logit_rows is not None
    assert batch.logit_rows.tolist() == [4, 5, 6, 7, 8, 9]
    assert batch.drawing.offsets.tolist() == [0, 1, 2, 5, 6]
    assert batch.drawing.requests.tolist() == [0, 1, 2, 2, 2, 3]
    assert batch.drawing.draw_positions.tolist() == [2, 9, 7, 8, 9, 19]
    assert batch.drawing.verify_lengths.tolist() == [0, 0, 2, 0]
    assert batch.sampling.seeds.tolist() == [6, 7, 2, 1]
    assert len(batch.drawing.drafts) == 4


@pytest.mark.parametrize('final', [False, True])
def test_chunks_alone(final: bool) -> None:
    chunks = [Chunk(5, 0, (1, 2, 3), final)]
    batch = mixed_batch(make_state((), chunks), make_plan(chunks), False, PAGE, STAGES)
    assert batch.rows.ids.tolist() == [1, 2, 3]
    assert batch.num_absorbing == (not final)
    assert batch.logit_rows is not None
    assert batch.logit_rows.tolist() == ([2] if final else [])
    assert batch.drawing.draw_positions.tolist() == ([3] if final else [])


def test_without_drafts_a_request_has_one_row() -> None:
    state = SlotState(3, 0, WIDTH, 100, torch.device('cpu'))
    state.apply(make_plan(admits=(Admit(1, 0, END, 0, SamplingParams(5)),), page_updates=(PageUpdate(1, 0, (1,)),)))
    state.advance(torch.tensor([1]), torch.tensor([2]), torch.tensor([9]), torch.zeros(1, 0, dtype=torch.int64))
    batch = decode_batch(state, torch.tensor([1]), WIDTH, None, PAGE, STAGES)
    assert batch.rows.ids.tolist() == [9]
    assert batch.drawing.drafts.shape == (1, 0)
