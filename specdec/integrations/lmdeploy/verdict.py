"""The target's verdict on a step, for LMDeploy: which drafts are accepted and what is emitted, by specdec's rule.

LMDeploy's own takes top-k, top-p and min-p into account on the last row only, draws from a global generator, and knows
the tokens of the step before this one late or never. Here every row has its pick: of the logits that the request's
settings leave, with noise that is a function of seed, position and id; a draft equal to it is accepted. Each of the
three can be left to LMDeploy. Next: history.py, what a row's history is.
"""

from dataclasses import dataclass
from typing import Any

import torch
from lmdeploy.pytorch.engine.logits_process import FusedLogitsProcessor, SamplingInputs, _torch_topk
from lmdeploy.pytorch.engine.model_agent.agent import BatchedLogProbs
from torch import Tensor

from specdec.integrations.lmdeploy.configs import STOCK_FILTERS, STOCK_SEEDS
from specdec.kernels.filter_threshold import MAX_TOP_K, Filters, filter_threshold
from specdec.kernels.noise import Noise
from specdec.kernels.pick import noisy_argmax


@dataclass(frozen=True, slots=True)
class Rows:
    """R = B * rows_each rows that draw a token, request by request; draw_positions [R] int64: of those tokens."""

    batch: int
    rows_each: int
    draw_positions: Tensor

    @property
    def last(self) -> Tensor:
        """Whether a row is its request's last [R]."""
        row = torch.arange(self.batch * self.rows_each, device=self.draw_positions.device)
        return row % self.rows_each == self.rows_each - 1


def drawing_rows(history: Tensor, lengths: Tensor, decoding: bool, rows_each: int) -> Rows:
    """`history` [B]: tokens in front of the step's rows; `lengths` [B]: rows, of which a prompt's last draws."""
    first = history + (1 if decoding else lengths)
    positions = first[:, None] + torch.arange(rows_each, device=history.device)
    return Rows(len(history), rows_each, positions.flatten())


def thresholds(scores: Tensor, settings: SamplingInputs, rows: Rows, last_only: bool) -> Tensor | None:
    """What scores [R, V], already over their temperatures, must reach [R]; None if no request has a filter.

    `settings` are those of the R rows. `last_only`: LMDeploy's way, filters on each request's last row alone.
    """
    if settings.max_top_k <= 0 and settings.top_k is None and settings.top_p is None and settings.min_p is None:
        return None
    device, count = scores.device, len(scores)
    top_k = settings.top_k
    if top_k is None:
        top_k = torch.full((count,), max(settings.max_top_k, 0), dtype=torch.int64, device=device)
    top_p = torch.ones(count, device=device) if settings.top_p is None else settings.top_p.float()
    min_p = torch.zeros(count, device=device) if settings.min_p is None else settings.min_p.float()
    bound = settings.max_top_k if 0 < settings.max_top_k <= MAX_TOP_K else 0
    filters = Filters(top_k.long().clamp(min=0), top_p, min_p, bound)
    found = filter_threshold(scores, torch.ones(count, device=device), filters)
    return torch.where(rows.last, found, float('-inf')) if last_only else found


def picks(scores: Tensor, settings: SamplingInputs, rows: Rows, threshold: Tensor | None) -> Tensor:
    """The pick of each row [R] int64: scores [R, V] fp32 over their temperatures."""
    heat = torch.ones(len(scores), device=scores.device)
    if settings.has_greedy and settings.top_k is not None:
        heat = torch.where(settings.top_k == 1, 0.0, heat)
    noise = Noise(settings.random_seeds.long(), rows.draw_positions)
    return noisy_argmax(scores, heat, threshold, noise).clamp(min=0)  # where the rules left no id LMDeploy says 0, too


def draw(scores: Tensor, settings: SamplingInputs, rows: Rows, stock: tuple[str, ...]) -> Tensor | None:
    """Tokens of all rows [R]; None: the verdict is LMDeploy's own, on `scores` filtered in place.

    scores [R, V] in the target's dtype.
    """
    if settings.max_top_k == 1:
        return scores.argmax(-1)
    last_only = STOCK_FILTERS in stock
    if STOCK_SEEDS in stock and last_only:
        return None
    exact = scores.float()
    threshold = thresholds(exact, settings, rows, last_only)
    if STOCK_SEEDS not in stock:
        return picks(exact, settings, rows, threshold)
    if threshold is not None:
        scores.masked_fill_(exact < threshold[:, None], float('-inf'))
    return None


def logprobs_of(raw: Tensor | None, tokens: Tensor, count: int) -> BatchedLogProbs | None:
    """LMDeploy's record for tokens [B, n], -1 where there is none: raw [B * n, V], and the `count` best of each row."""
    if raw is None or count <= 0:
        return None
    ids = tokens.flatten()[:, None]
    best = _torch_topk(raw, count, dim=-1)
    values = torch.cat([raw.gather(-1, ids.clamp(min=0)), best[0]], -1)
    return BatchedLogProbs(vals=values, indices=torch.cat([ids, best[1]], -1).to(torch.int32))


async def processed(logits: Tensor, settings: SamplingInputs, logprobs_mode: str | None) -> tuple[Tensor, Any]:
    """LMDeploy's processing of logits [R, V]: penalties, temperature, bad words; and raw log-probabilities or None."""
    return await FusedLogitsProcessor(settings, logprobs_mode=logprobs_mode)(logits)
