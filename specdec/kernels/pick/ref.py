"""Picks in plain torch."""

import torch
from torch import Tensor

from specdec.kernels.noise.ref import gumbel


def argmax(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def noisy_argmax(
    logits: Tensor, temperature: Tensor, threshold: Tensor | None, seeds: Tensor, positions: Tensor, stream: int
) -> Tensor:
    samples = temperature > 0
    scaled = logits / torch.where(samples, temperature, 1.0)[:, None]
    if threshold is not None:
        scaled = scaled.masked_fill(scaled < threshold[:, None], float('-inf'))
    noisy = scaled + gumbel(seeds, positions, logits.shape[1], stream)
    return torch.where(samples, noisy.argmax(-1), logits.argmax(-1))
