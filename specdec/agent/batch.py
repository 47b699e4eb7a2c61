"""Packing a plan and the slots' state into the rows of one forward. The only packing code.

Rows: prompt chunks first, at offsets the host knows, then each decoding request's anchor and drafts. Requests: chunks
that do not end their prompt, chunks that do, decoding requests; so the requests that draw a token are a suffix, and so
are the rows whose logits are wanted once the chunks' last rows are put in front. Next: models/target.py.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.agent.state import (
    ANCHOR,
    CAP,
    DRAFT_SAMPLING,
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
from specdec.agent.transfer import to_device
from specdec.kernels.kv_cache import cache_slots
from specdec.kernels.paged_attention import RowLayout
from specdec.models.target import Rows
from specdec.plan import Chunk, Stage, StepPlan
from specdec.spec_decode.logits import LogitRows, Sampling
from specdec.spec_decode.verify_length import fixed


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tensors. B requests, of which the last P draw tokens; T rows, of which R have logits.

    `slots` [B]; `num_absorbing` = B - P; `logit_rows` [R]: packed row of each logits row, None if they are the same;
    `drawing`: whose they are, the P requests' drafts and verify lengths (0 for a chunk's end); `sampling` of the P.

    Where rows are padded, those behind the last offset belong to nobody: they write to the scratch page.
    """

    rows: Rows
    slots: Tensor
    num_absorbing: int
    logit_rows: Tensor | None
    drawing: LogitRows
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class _Packed:
    """Rows of some requests: ids, positions, entries, request of each row, offsets [n + 1], contexts [n]."""

    ids: Tensor
    positions: Tensor
    entries: Tensor
    requests: Tensor
    offsets: Tensor
    contexts: Tensor


def decode_batch(
    state: SlotState, slots: Tensor, table_width: int, num_rows: int | None, page_size: int, stages: Stage
) -> Batch:
    """A step without prompt chunks. `num_rows` pads the rows; None fits them: the host then waits for the device."""
    page_table = state.page_table[slots, :table_width]
    ints, drafts = state.ints[slots], state.drafts[slots]
    lengths = _verify_lengths(state, slots, ints)
    packed = _decode_rows(ints, drafts, lengths, page_table, num_rows, page_size)
    layout = RowLayout(packed.offsets, packed.contexts, page_table, (), state.num_drafts + 1, page_size)
    return Batch(
        rows=Rows(packed.ids, packed.positions, packed.entries, slots, layout),
        slots=slots,
        num_absorbing=0,
        logit_rows=None,
        drawing=LogitRows(packed.requests, packed.offsets, packed.positions + 1, drafts, lengths),
        sampling=_sampling(state, slots, ints, stages),
    )


def mixed_batch(state: SlotState, plan: StepPlan, pad: bool, page_size: int, stages: Stage) -> Batch:
    """A step with prompt chunks, and decoding rows behind them if there are any, padded to a bound if `pad`."""
    device, num_chunks, absorbing = state.device, len(plan.chunks), plan.num_absorbing
    num_final = num_chunks - absorbing
    slots = to_device([chunk.slot for chunk in plan.chunks] + list(plan.decodes), device)
    page_table = state.page_table[slots, : plan.table_width]
    drawing = slots[absorbing:]
    ints, drafts = state.ints[drawing], state.drafts[drawing]
    chunks = _chunk_rows(plan.chunks, page_table[:num_chunks], page_size, device)
    num_rows = plan.row_bound if pad else None
    lengths = _verify_lengths(state, drawing[num_final:], ints[num_final:])
    decoding = _decode_rows(ints[num_final:], drafts[num_final:], lengths, page_table[num_chunks:], num_rows, page_size)
    packed = _join(chunks, decoding)
    logit_rows, logit_offsets, logit_requests = _logit_rows(chunks, decoding, absorbing)
    layout = RowLayout(
        row_offsets=packed.offsets,
        contexts=packed.contexts,
        page_table=page_table,
        chunk_rows=tuple(len(chunk.token_ids) for chunk in plan.chunks),
        tile_rows=state.num_drafts + 1,
        page_size=page_size,
    )
    return Batch(
        rows=Rows(packed.ids, packed.positions, packed.entries, slots, layout),
        slots=slots,
        num_absorbing=absorbing,
        logit_rows=logit_rows,
        drawing=LogitRows(
            requests=logit_requests,
            offsets=logit_offsets,
            draw_positions=packed.positions[logit_rows] + 1,
            drafts=drafts,
            verify_lengths=F.pad(lengths, (num_final, 0)),
        ),
        sampling=_sampling(state, drawing, ints, stages),
    )


def _sampling(state: SlotState, slots: Tensor, ints: Tensor, stages: Stage) -> Sampling:
    floats = state.floats[slots] if Stage.NOISE in stages else state.floats[:0]
    return Sampling(
        slots=slots,
        seeds=ints[:, SEED],
        top_k=ints[:, TOP_K],
        stop_from=ints[:, STOP_FROM],
        end=ints[:, END],
        draft_sampling=ints[:, DRAFT_SAMPLING],
        temperature=floats[:, TEMPERATURE],
        top_p=floats[:, TOP_P],
        min_p=floats[:, MIN_P],
        stop_ids=state.stop_ids[slots],
        banned_ids=state.banned_ids[slots] if Stage.BANS in stages else state.banned_ids[:0],
    )


def _verify_lengths(state: SlotState, slots: Tensor, ints: Tensor) -> Tensor:
    """Drafts of each decoding slot [n] that this step verifies, by the engine's rule and the step's budget."""
    available = fixed(ints[:, NUM_DRAFTS], ints[:, CAP], ints[:, END] - 1 - ints[:, LENGTH])
    if not state.lengths.reads_survival:
        return available
    return state.lengths.choose(available, state.survival[slots], state.budget)


def _decode_rows(
    ints: Tensor, drafts: Tensor, lengths: Tensor, page_table: Tensor, num_rows: int | None, page_size: int
) -> _Packed:
    """Anchor and the first `lengths` drafts of each decoding request, packed."""
    starts = ints[:, LENGTH]
    offsets = F.pad((lengths + 1).cumsum(0), (1, 0))
    tokens = torch.cat([ints[:, ANCHOR, None], drafts], 1)
    if num_rows is None:
        requests, step = _row_requests(offsets, int(offsets[-1]))
        ids, positions = tokens[requests, step], starts[requests] + step
        entries = cache_slots(page_table, requests, positions, page_size)
    else:
        requests, step = _row_requests(offsets, num_rows)
        used = requests < starts.shape[0]
        requests, step = torch.where(used, requests, 0), torch.where(used, step, 0)
        ids, positions = torch.where(used, tokens[requests, step], 0), torch.where(used, starts[requests] + step, 0)
        entries = torch.where(used, cache_slots(page_table, requests, positions, page_size), 0)
    return _Packed(ids, positions, entries, requests, offsets, starts)


def _row_requests(offsets: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Request of each packed row, one past the last for rows behind the last offset, and its place in the request."""
    row = torch.arange(num_rows, device=offsets.device)
    requests = torch.searchsorted(offsets[1:], row, right=True)
    return requests, row - offsets[requests]


def _chunk_rows(chunks: tuple[Chunk, ...], page_table: Tensor, page_size: int, device: torch.device) -> _Packed:
    ids = [i for chunk in chunks for i in chunk.token_ids]
    positions = [p for chunk in chunks for p in range(chunk.start, chunk.start + len(chunk.token_ids))]
    requests = [r for r, chunk in enumerate(chunks) for _ in chunk.token_ids]
    offsets = [0]
    for chunk in chunks:
        offsets.append(offsets[-1] + len(chunk.token_ids))
    table = to_device([ids, positions, requests], device)
    bounds = to_device(offsets + [chunk.start for chunk in chunks], device)
    entries = cache_slots(page_table, table[2], table[1], page_size)
    return _Packed(table[0], table[1], entries, table[2], bounds[: len(offsets)], bounds[len(offsets) :])


def _join(first: _Packed, second: _Packed) -> _Packed:
    return _Packed(
        torch.cat([first.ids, second.ids]),
        torch.cat([first.positions, second.positions]),
        torch.cat([first.entries, second.entries]),
        torch.cat([first.requests, second.requests + first.contexts.shape[0]]),
        torch.cat([first.offsets, second.offsets[1:] + first.offsets[-1]]),
        torch.cat([first.contexts, second.contexts]),
    )


def _logit_rows(chunks: _Packed, decoding: _Packed, absorbing: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each final chunk's last row, then every decoding row -> (packed rows, offsets [P + 1], requests)."""
    ends = chunks.offsets[absorbing + 1 :] - 1
    num_final = ends.shape[0]
    final = torch.arange(num_final, device=ends.device)
    rows = torch.cat([ends, chunks.ids.shape[0] + torch.arange(decoding.ids.shape[0], device=ends.device)])
    return rows, torch.cat([final, decoding.offsets + num_final]), torch.cat([final, decoding.requests + num_final])
