"""Picks in plain torch."""

import torch
from torch import Tensor

from specdec.kernels.noise import PICK, Noise
from specdec.kernels.noise.ref import gumbel, gumbel_at
from specdec.kernels.pick import NO_PICK

FEW = 8  # noise for an id of its own costs as much as for four neighbours, and finding it costs something too


def argmax(logits: Tensor) -> Tensor:
    best = logits.max(-1)
    return torch.where(best.values == float('-inf'), NO_PICK, best.indices)


def noisy_argmax(
    logits: Tensor, temperature: Tensor, threshold: Tensor | None, noise: Noise, ids: Tensor | None
) -> Tensor:
    if threshold is not None:
        survivors = _survivors(logits, temperature, threshold)
        if survivors is not None:
            return _argmax_of_survivors(logits, temperature, survivors, noise, ids)
    return argmax_with(noise_values(noise, ids, logits.shape[1]), logits, temperature, threshold)


def _survivors(logits: Tensor, temperature: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor] | None:
    """(rows, columns) that reach their thresholds, if they are so few that noise for all would cost more."""
    reach = (logits / torch.where(temperature > 0, temperature, 1.0)[:, None]) >= threshold[:, None]
    reach &= (temperature > 0)[:, None]
    rows, columns = reach.nonzero(as_tuple=True)
    return (rows, columns) if FEW * len(rows) < logits.numel() else None


def _argmax_of_survivors(
    logits: Tensor, temperature: Tensor, survivors: tuple[Tensor, Tensor], noise: Noise, ids: Tensor | None
) -> Tensor:
    rows, columns = survivors
    streams = PICK if noise.streams is None else noise.streams[rows]
    names = columns if ids is None else ids[columns]
    values = gumbel_at(noise.seeds[rows], noise.positions[rows], names[:, None], streams).squeeze(1)
    noisy = logits.masked_fill((temperature > 0)[:, None], float('-inf'))
    noisy[rows, columns] = logits[rows, columns] / temperature[rows] + values
    return argmax(noisy)


def noise_values(noise: Noise, ids: Tensor | None, vocabulary: int) -> Tensor:
    """Gumbel values [R, V] of the columns, whose ids are `ids` or the columns themselves."""
    streams = PICK if noise.streams is None else noise.streams
    if ids is None:
        return gumbel(noise.seeds, noise.positions, vocabulary, streams)
    return gumbel_at(noise.seeds, noise.positions, ids, streams)


def argmax_with(values: Tensor, logits: Tensor, temperature: Tensor, threshold: Tensor | None) -> Tensor:
    """noisy_argmax for noise [R, V] that is there already."""
    samples = (temperature > 0)[:, None]
    noisy = logits / torch.where(samples, temperature[:, None], 1.0)
    if threshold is not None:
        noisy.masked_fill_((noisy < threshold[:, None]) & samples, float('-inf'))
    return argmax(noisy.add_(torch.where(samples, values, 0.0)))
