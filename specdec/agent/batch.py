"""Packing a plan and the slots' state into the rows of one forward. The only packing code.

Rows: prompt chunks first, at offsets the host knows, then each decoding request's anchor and drafts. Requests: chunks
that do not end their prompt, chunks that do, decoding requests; so the requests that draw a token are a suffix, and so
are the rows whose logits are wanted once the chunks' last rows are put in front. Next: models/target.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

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
from specdec.kernels.kv_cache import cache_slots
from specdec.kernels.paged_attention import RowLayout
from specdec.models.target import Rows
from specdec.plan import StepPlan
from specdec.spec_decode.logits import Sampling
from specdec.spec_decode.verify_length import fixed


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tensors. B requests, of which the last P draw tokens; T rows, of which R have logits.

    `slots` [B]; `verify_lengths` [P] (0 for a chunk's end); `drafts` [P, K]; `sampling` of the P; `logit_rows` [R]:
    packed row of each logits row, None if they are the same; `logit_offsets` [P + 1]: request p's logits rows;
    `logit_requests` [R]: which of the P; `draw_positions` [R]: position of the token that the row draws.
    """

    rows: Rows
    slots: Tensor
    verify_lengths: Tensor
    drafts: Tensor
    sampling: Sampling
    logit_rows: Tensor | None
    logit_offsets: Tensor
    logit_requests: Tensor
    draw_positions: Tensor


@dataclass(frozen=True, slots=True)
class _Packed:
    """Rows of some requests: ids, positions, request of each row (counted from 0), offsets [n + 1], contexts [n]."""

    ids: Tensor
    positions: Tensor
    requests: Tensor
    offsets: Tensor
    contexts: Tensor


def build_batch(plan: StepPlan, state: SlotState, page_size: int) -> Batch:
    device = state.device
    slots = torch.tensor([chunk.slot for chunk in plan.chunks] + list(plan.decodes), device=device)
    num_chunks = len(plan.chunks)
    page_table = state.page_table[slots, : plan.table_width]
    num_final = num_chunks - plan.num_absorbing
    drawing = slots[plan.num_absorbing :]
    ints, drafts = state.ints[drawing], state.drafts[drawing]
    decoding, lengths = _decode_rows(ints[num_final:], drafts[num_final:])
    if num_chunks:
        chunks = _chunk_rows(plan, device)
        packed = _join(chunks, decoding)
        logit_rows, logit_offsets, logit_requests = _logit_rows(plan, chunks, decoding)
        draw_positions = packed.positions[logit_rows] + 1
        lengths = torch.cat([lengths.new_zeros(num_final), lengths])
    else:
        packed, logit_rows = decoding, None
        logit_offsets, logit_requests, draw_positions = decoding.offsets, decoding.requests, decoding.positions + 1
    layout = RowLayout(
        row_offsets=packed.offsets,
        contexts=packed.contexts,
        page_table=page_table,
        chunk_rows=tuple(len(chunk.token_ids) for chunk in plan.chunks),
        tile_rows=state.num_drafts + 1,
        page_size=page_size,
    )
    entries = cache_slots(page_table, packed.requests, packed.positions, page_size)
    rows = Rows(packed.ids, packed.positions, entries, layout)
    sampling = _sampling(state, drawing, ints, plan.samples, plan.bans)
    return Batch(rows, slots, lengths, drafts, sampling, logit_rows, logit_offsets, logit_requests, draw_positions)


def _sampling(state: SlotState, slots: Tensor, ints: Tensor, samples: bool, bans: bool) -> Sampling:
    floats = state.floats[slots] if samples else state.floats[:0]
    return Sampling(
        seeds=ints[:, SEED],
        top_k=ints[:, TOP_K],
        stop_from=ints[:, STOP_FROM],
        end=ints[:, END],
        temperature=floats[:, TEMPERATURE],
        top_p=floats[:, TOP_P],
        min_p=floats[:, MIN_P],
        stop_ids=state.stop_ids[slots],
        banned_ids=state.banned_ids[slots] if bans else state.banned_ids[:0],
    )


def _decode_rows(ints: Tensor, drafts: Tensor) -> tuple[_Packed, Tensor]:
    """Anchor and verified drafts of each decoding request, packed -> (rows, verify lengths)."""
    starts = ints[:, LENGTH]
    lengths = fixed(ints[:, NUM_DRAFTS], ints[:, CAP], ints[:, END] - 1 - starts)
    offsets = torch.nn.functional.pad((lengths + 1).cumsum(0), (1, 0))
    row = torch.arange(int(offsets[-1]), device=ints.device)
    requests = torch.searchsorted(offsets[1:], row, right=True)
    step = row - offsets[requests]
    tokens = torch.cat([ints[:, ANCHOR, None], drafts], 1)
    return _Packed(tokens[requests, step], starts[requests] + step, requests, offsets, starts), lengths


def _chunk_rows(plan: StepPlan, device: torch.device) -> _Packed:
    ids = [i for chunk in plan.chunks for i in chunk.token_ids]
    positions = [p for chunk in plan.chunks for p in range(chunk.start, chunk.start + len(chunk.token_ids))]
    requests = [r for r, chunk in enumerate(plan.chunks) for _ in chunk.token_ids]
    offsets = [0]
    for chunk in plan.chunks:
        offsets.append(offsets[-1] + len(chunk.token_ids))
    starts = [chunk.start for chunk in plan.chunks]
    return _Packed(*(torch.tensor(x, device=device) for x in (ids, positions, requests, offsets, starts)))


def _join(first: _Packed, second: _Packed) -> _Packed:
    return _Packed(
        torch.cat([first.ids, second.ids]),
        torch.cat([first.positions, second.positions]),
        torch.cat([first.requests, second.requests + first.contexts.shape[0]]),
        torch.cat([first.offsets, second.offsets[1:] + first.offsets[-1]]),
        torch.cat([first.contexts, second.contexts]),
    )


def _logit_rows(plan: StepPlan, chunks: _Packed, decoding: _Packed) -> tuple[Tensor, Tensor, Tensor]:
    """Each final chunk's last row, then every decoding row -> (packed rows, offsets [P + 1], requests)."""
    absorbing = plan.num_absorbing
    ends = chunks.offsets[absorbing + 1 :] - 1
    num_final = ends.shape[0]
    final = torch.arange(num_final, device=ends.device)
    rows = torch.cat([ends, chunks.ids.shape[0] + torch.arange(decoding.ids.shape[0], device=ends.device)])
    return rows, torch.cat([final, decoding.offsets + num_final]), torch.cat([final, decoding.requests + num_final])
