"""Temperatures make a head's survivals true, where its logits are off by a factor, and leave a true head alone."""

import pytest
import torch

from specdec.spec_decode.calibration import BINS, Blocks, fit_temperatures, overall, reliability

K = 4


def blocks_of(factor: torch.Tensor, count: int, seed: int) -> Blocks:
    """A head that says `factor` [K] times the true logits of each conditional acceptance."""
    generator = torch.Generator().manual_seed(seed)
    true = torch.randn(count, K, generator=generator) + 1
    passes = torch.rand(count, K, generator=generator) < true.sigmoid()
    accepted = passes.long().cumprod(1).sum(1)
    return Blocks(true * factor, torch.full((count,), K), accepted)


def test_the_factor_is_found_at_every_position() -> None:
    factor = torch.tensor([3.0, 0.5, 2.0, 1.0])
    found = fit_temperatures(blocks_of(factor, 20_000, 1))
    assert found.tolist() == pytest.approx(factor.tolist(), rel=0.35)
    judged = blocks_of(factor, 20_000, 2)
    assert overall(judged, found).error < 0.5 * overall(judged, torch.ones(K)).error


def test_a_true_head_keeps_its_temperatures() -> None:
    assert fit_temperatures(blocks_of(torch.ones(K), 3000, 3)).tolist() == pytest.approx([1.0] * K, abs=0.25)


def test_a_position_that_nobody_verified_keeps_one() -> None:
    blocks = blocks_of(torch.full((K,), 3.0), 2000, 4)
    short = Blocks(blocks.logits, torch.full_like(blocks.verified, 2), blocks.accepted.clamp(max=2))
    found = fit_temperatures(short)
    assert found[2:].tolist() == [1.0, 1.0]
    assert found[0] > 1.5


def test_reliability_by_hand() -> None:
    found = reliability(torch.tensor([0.1, 0.1, 0.9, 1.0]), torch.tensor([0, 1, 1, 1]))
    assert found.counts.sum() == 4
    assert found.counts[2] == 2
    assert found.observed[2] == 0.5
    assert found.counts[BINS - 1] == 1  # a prediction of exactly 1 belongs to the last bin
    assert found.error == pytest.approx((0.8 + 0.1 + 0.0) / 4)
