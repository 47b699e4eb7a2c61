"""Top-k, top-p and min-p of a row as one number: what a value must reach to survive all three."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.dispatch import Implementations

_implementation = Implementations(__name__, cuda='triton')

MAX_TOP_K = 256  # a batch whose filters all keep at most so many ids need not rank the vocabulary


@dataclass(frozen=True, slots=True)
class Filters:
    """Of R rows or requests: top_k [R] int64 (0: all), top_p, min_p [R] fp32. `bound` > 0 promises that those with a
    filter have 1 <= top_k <= bound; those without a top_k then have no filter at all.
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    bound: int = 0

    def __getitem__(self, index: Tensor) -> 'Filters':
        return Filters(self.top_k[index], self.top_p[index], self.min_p[index], self.bound)


def filter_threshold(logits: Tensor, temperature: Tensor, filters: Filters) -> Tensor:
    """logits [R, V] fp32, temperature [R] fp32 -> what logits / temperature must reach [R] fp32; temperature 0 is 1.

    Each filter keeps what is at least as large as its last kept value, on the renormalised survivors of the one before,
    so together they are one threshold per row and equal values share a fate.
    """
    threshold = _implementation(logits.device.type, 'filter_threshold')
    return threshold(logits, temperature, filters.top_k, filters.top_p, filters.min_p, filters.bound)


def divided(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits [R, V] / temperature [R], where it is not 0."""
    return logits / torch.where(temperature > 0, temperature, 1.0)[:, None]


def cut(scaled: Tensor, threshold: Tensor) -> Tensor:
    """-inf below the rows' thresholds [R]."""
    return scaled.masked_fill(scaled < threshold[:, None], float('-inf'))
