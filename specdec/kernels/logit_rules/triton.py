"""The rules on a GPU: one pass over the logits; a row whose request has no rule of a kind skips it on a flag."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import launch_options, release, wait
from specdec.kernels.logit_rules import RuleRows, RuleTables

TILE = 2048


@triton.jit
def _rules_kernel(
    logits, out, requests, steps, slots, drafts, counts, penalties, bias_ids, bias_values, num_bias, masks, forced,
    vocabulary, row_stride, num_drafts, max_bias, mask_steps, words,
    TILE: tl.constexpr, BIAS: tl.constexpr, PENALTIES: tl.constexpr, MASKS: tl.constexpr, FORCED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = ids < vocabulary
    wait(OVERLAP)
    release(OVERLAP)
    request, step = tl.load(requests + row), tl.load(steps + row)
    slot = tl.load(slots + request)
    values = tl.load(logits + row * row_stride + ids, mask=inside, other=float('-inf'))
    if BIAS:
        for entry in range(tl.load(num_bias + slot)):
            biased = tl.load(bias_ids + slot * max_bias + entry) == ids
            values = tl.where(biased, values + tl.load(bias_values + slot * max_bias + entry), values)
    if PENALTIES:
        repetition = tl.load(penalties + slot * 3)
        presence = tl.load(penalties + slot * 3 + 1)
        frequency = tl.load(penalties + slot * 3 + 2)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            count = tl.load(counts + slot * vocabulary + ids, mask=inside, other=0)
            for draft in range(num_drafts):
                same = (tl.load(drafts + request * num_drafts + draft) == ids) & (draft < step)
                count += tl.where(same, 2, 0)
            scaled = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
            times = (count >> 1).to(tl.float32)
            values = tl.where(count > 0, scaled, values)
            values -= frequency * times + tl.where(times > 0, presence, 0.0)
    if MASKS:
        place = masks + (slot * mask_steps + step) * words + (ids >> 5)
        bits = tl.load(place, mask=inside, other=0) >> (ids & 31)
        values = tl.where((bits & 1) != 0, values, float('-inf'))
    if FORCED:
        only = tl.load(forced + row)
        values = tl.where((only < 0) | (only == ids), values, float('-inf'))
    tl.store(out + row * vocabulary + ids, values, mask=inside)


def apply_rules(
    logits: Tensor,
    rows: RuleRows,
    tables: RuleTables,
    bias: bool,
    penalties: bool,
    masks: bool,
    forced: Tensor | None,
) -> Tensor:
    count, vocabulary = logits.shape
    out = torch.empty(count, vocabulary, dtype=torch.float32, device=logits.device)
    _rules_kernel[(count, triton.cdiv(vocabulary, TILE))](
        logits, out, rows.requests, rows.steps, rows.slots, rows.drafts, tables.counts, tables.penalties,
        tables.bias_ids, tables.bias_values, tables.num_bias, tables.masks, forced,
        vocabulary, logits.stride(0), rows.drafts.shape[1], tables.bias_ids.shape[1], *tables.masks.shape[1:],
        TILE=TILE, BIAS=bias, PENALTIES=penalties, MASKS=masks, FORCED=forced is not None, num_warps=8,
        **launch_options(logits.device),
    )  # fmt: skip
    return out
