"""Making a confidence head's survivals true: one temperature per position, fitted in order (DSpark paper, "STS").

Data are blocks that were verified: what the head said and how many drafts were accepted. Plain PyTorch on the CPU; no
engine. Next: cli/calibrate.py, which collects blocks and writes the result.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 20  # of equal width in [0, 1], as DeepSpec measures
GRID = torch.logspace(-1.0, 1.0, 161)  # temperatures tried at each position


@dataclass(frozen=True, slots=True)
class Blocks:
    """N blocks: confidence logits [N, K] fp32, drafts verified [N] and accepted [N]."""

    logits: Tensor
    verified: Tensor
    accepted: Tensor

    def __len__(self) -> int:
        return len(self.verified)

    def survivals(self, temperatures: Tensor) -> Tensor:
        """Predicted chance that drafts 1..k are all accepted [N, K]."""
        return (self.logits / temperatures).sigmoid().cumprod(1)

    def outcomes(self, position: int) -> tuple[Tensor, Tensor]:
        """Blocks in which draft `position` was verified, and whether it and all before it were accepted."""
        tested = self.verified > position
        return tested, (self.accepted[tested] > position).double()


@dataclass(frozen=True, slots=True)
class Reliability:
    """Per bin of predicted survival: how many, mean prediction, share that came true. `error`: expected calibration
    error, the mean gap weighted by counts.
    """

    counts: Tensor
    predicted: Tensor
    observed: Tensor
    error: float


def reliability(predicted: Tensor, true: Tensor) -> Reliability:
    """predicted [n] in [0, 1], true [n] in {0, 1}."""
    predicted = predicted.double()
    bins = (predicted * BINS).long().clamp(0, BINS - 1)
    counts = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, torch.ones_like(predicted))
    sums = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, predicted)
    hits = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, true.double())
    error = float((sums - hits).abs().sum() / max(len(predicted), 1))
    safe = counts.clamp(min=1)
    return Reliability(counts, sums / safe, hits / safe, error)


def overall(blocks: Blocks, temperatures: Tensor) -> Reliability:
    """All positions together."""
    survivals, predicted, true = blocks.survivals(temperatures), [], []
    for position in range(survivals.shape[1]):
        tested, outcome = blocks.outcomes(position)
        predicted.append(survivals[tested, position])
        true.append(outcome)
    return reliability(torch.cat(predicted), torch.cat(true))


def fit_temperatures(blocks: Blocks) -> Tensor:
    """Temperatures [K]: for k = 1, 2, ... the one with the least calibration error of the survival up to k, those
    before it kept. Errors within one standard error of the least count as equal, and of equal ones the temperature
    nearest to 1 is taken; a position that nobody verified keeps 1.
    """
    num_positions = blocks.logits.shape[1]
    temperatures = torch.ones(num_positions)
    grid = GRID[GRID.log().abs().argsort()]
    for position in range(num_positions):
        tested, true = blocks.outcomes(position)
        if not len(true):
            continue
        before = blocks.survivals(temperatures)[tested, position - 1] if position else torch.ones(len(true))
        logits = blocks.logits[tested, position]
        errors = [reliability(before * (logits / t).sigmoid(), true).error for t in grid]
        least = min(errors)
        chance = before * (logits / grid[errors.index(least)]).sigmoid()
        noise = float((chance * (1 - chance)).mean() / len(true)) ** 0.5
        temperatures[position] = next(t for t, error in zip(grid, errors) if error <= least + noise)
    return temperatures
