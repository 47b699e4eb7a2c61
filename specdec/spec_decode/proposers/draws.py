"""How a proposer's tokens are drawn: the likeliest, or with noise from the draft's own distribution, per request.

Coupled drafts use the noise of the target's picks, so that draft and pick agree more often than two independent draws
would; probabilistic ones use noise of their own, and their distribution is handed on for the test by p / q
(docs/exactness.md). Next: dflash.py and dspark.py, which draw.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.filter_threshold import Filters, cut, divided, filter_threshold
from specdec.kernels.markov import ChainDraws
from specdec.kernels.noise import DRAFT, PICK, Noise
from specdec.kernels.pick import argmax, noisy_argmax

GREEDY, COUPLED, PROBABILISTIC = range(3)


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """Of P requests: kinds [P] (GREEDY, COUPLED, PROBABILISTIC), seeds [P] int64, temperature [P] fp32 (0: greedy,
    whatever the kind). `filters` of the P, None if nobody has one: what the target's filters cut is not worth drafting.
    `keeps`: somebody needs the distributions that the drafts were drawn from.
    """

    kinds: Tensor
    seeds: Tensor
    temperature: Tensor
    filters: Filters | None
    keeps: bool

    def noise(self, lengths: Tensor) -> Noise:
        """Keys of the first draft behind each request's anchor, which is at lengths [P]."""
        own = DRAFT + (lengths << 32)  # fresh noise where a position is drafted again behind another anchor
        return Noise(self.seeds, lengths + 1, torch.where(self.kinds == PROBABILISTIC, own, PICK))

    @property
    def draft_temperature(self) -> Tensor:
        """The request's own, 0 where its drafts are the likeliest tokens."""
        return torch.where(self.kinds == GREEDY, 0.0, self.temperature)


def chain_draws(
    sampling: DraftSampling | None, lengths: Tensor, logits: Tensor
) -> tuple[ChainDraws | None, Tensor | None]:
    """How a chain over base logits [P, K, V] draws, None for the likeliest tokens; and where it keeps its logits, if
    somebody will ask what the tokens were drawn from.
    """
    if sampling is None:
        return None, None
    kept = torch.empty_like(logits) if sampling.keeps else None
    return ChainDraws(sampling.draft_temperature, sampling.noise(lengths), sampling.filters, kept), kept


def draw_rows(logits: Tensor, sampling: DraftSampling | None, lengths: Tensor, ids: Tensor | None) -> Tensor:
    """One token for each row of logits [P, K, V] by itself -> columns [P, K]. `ids` [V]: target ids of columns."""
    if sampling is None:
        return argmax(logits)
    num_requests, num_drafts, _ = logits.shape
    first = sampling.noise(lengths)
    request = torch.arange(num_requests, device=lengths.device).repeat_interleave(num_drafts)
    positions = first.positions[:, None] + torch.arange(num_drafts, device=lengths.device)
    noise = Noise(first.seeds[request], positions.flatten(), first.streams[request])
    rows, heat, threshold = logits.flatten(0, 1), sampling.draft_temperature[request], None
    if sampling.filters is not None:
        threshold = filter_threshold(rows, heat, sampling.filters[request])
    return noisy_argmax(rows, heat, threshold, noise, ids).view(num_requests, num_drafts)


def distributions(logits: Tensor, sampling: DraftSampling, ids: Tensor | None, vocabulary: int) -> Tensor:
    """What tokens of logits [P, K, Vd] are drawn from, over target ids [P, K, V] fp32; `ids` [Vd] as above."""
    request = torch.arange(len(logits), device=logits.device).repeat_interleave(logits.shape[1])
    rows, heat = logits.flatten(0, 1), sampling.draft_temperature[request]
    scaled = divided(rows, heat)
    if sampling.filters is not None:
        scaled = cut(scaled, filter_threshold(rows, heat, sampling.filters[request]))
    q = scaled.softmax(-1).view_as(logits)
    return q if ids is None else q.new_zeros(*q.shape[:2], vocabulary).index_copy_(2, ids, q)
