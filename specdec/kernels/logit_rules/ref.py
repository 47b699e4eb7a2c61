"""The rules in plain torch. Dense work per request where it can be, so that a block's rows share it."""

import torch
from torch import Tensor

from specdec.kernels.logit_rules import RuleRows, RuleTables


def apply_rules(
    logits: Tensor,
    rows: RuleRows,
    tables: RuleTables,
    bias: bool,
    penalties: bool,
    masks: bool,
    forced: Tensor | None,
) -> Tensor:
    owned = False
    if bias:
        slots = rows.slots[rows.requests]
        logits, owned = logits.clone().scatter_add_(1, tables.bias_ids[slots], tables.bias_values[slots]), True
    if penalties:
        logits, owned = _penalise(logits, rows, tables), True
    allowed = _allowed(rows, tables, logits.shape[1]) if masks else None
    if forced is not None:
        only = forced[:, None] == torch.arange(logits.shape[1], device=logits.device)
        only |= (forced < 0)[:, None]
        allowed = only if allowed is None else allowed & only
    if allowed is not None:
        logits, owned = torch.where(allowed, logits, float('-inf')), True
    return logits if owned else logits.clone()


def _penalise(logits: Tensor, rows: RuleRows, tables: RuleTables) -> Tensor:
    """Every row with its request's counts, then the ids of its block's drafts again, with the block counted in."""
    counts, strengths = tables.counts[rows.slots], tables.penalties[rows.slots]
    factors, costs = _strengths(counts, strengths)
    found = _penalised(logits, factors[rows.requests], costs[rows.requests])
    drafts = rows.drafts[rows.requests]
    earlier = torch.arange(drafts.shape[1], device=drafts.device) < rows.steps[:, None]
    times = ((drafts[:, :, None] == drafts[:, None, :]) & earlier[:, None, :]).sum(-1)
    counts = counts[rows.requests[:, None], drafts] + 2 * times.int()
    factors, costs = _strengths(counts, strengths[rows.requests])
    return found.scatter_(1, drafts, _penalised(logits.gather(1, drafts), factors, costs))


def _strengths(counts: Tensor, strengths: Tensor) -> tuple[Tensor, Tensor]:
    """counts [n, v], strengths [n, 3] -> what each id's logit is divided or multiplied by, and what is subtracted."""
    repetition, presence, frequency = strengths.unsqueeze(-1).unbind(1)
    times = (counts >> 1).float()
    return torch.where(counts > 0, repetition, 1.0), frequency * times + presence * (times > 0)


def _penalised(logits: Tensor, factors: Tensor, costs: Tensor) -> Tensor:
    return torch.where(logits > 0, logits / factors, logits * factors).sub_(costs)


def _allowed(rows: RuleRows, tables: RuleTables, vocabulary: int) -> Tensor:
    words = tables.masks[rows.slots[rows.requests], rows.steps]
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    return bits.flatten(1)[:, :vocabulary] != 0
