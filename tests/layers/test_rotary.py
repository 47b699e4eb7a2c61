"""Rotary tables against their formulas; transformers' own are compared in tests/models/test_qwen3_parity.py."""

import math

import pytest
import torch

from specdec.layers.rotary import RopeConfig, attention_factor, inverse_frequencies, rotary_table

CPU = torch.device('cpu')
YARN = RopeConfig(10000.0, 'yarn', factor=4.0, original_max_position=64)


def test_table_holds_cosines_and_signed_sines() -> None:
    table = rotary_table(RopeConfig(100.0), 6, 30, CPU)
    assert table.shape == (30, 2, 6)
    assert table.dtype == torch.float32
    for position in (0, 1, 29):
        for i in range(3):
            angle = position * 100.0 ** (-2 * i / 6)
            assert table[position, 0, [i, i + 3]].tolist() == pytest.approx([math.cos(angle)] * 2, abs=1e-5)
            assert table[position, 1, i].item() == pytest.approx(-math.sin(angle), abs=1e-5)
            assert table[position, 1, i + 3].item() == pytest.approx(math.sin(angle), abs=1e-5)


def test_a_longer_table_begins_with_the_shorter_one() -> None:
    assert torch.equal(rotary_table(YARN, 8, 50, CPU)[:20], rotary_table(YARN, 8, 20, CPU))


def test_linear_scaling_divides_positions() -> None:
    plain = rotary_table(RopeConfig(500.0), 8, 10, CPU)
    scaled = rotary_table(RopeConfig(500.0, 'linear', factor=3.0), 8, 30, CPU)
    torch.testing.assert_close(scaled[::3], plain, atol=1e-5, rtol=0)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones() -> None:
    plain, scaled = inverse_frequencies(RopeConfig(10000.0), 64), inverse_frequencies(YARN, 64)
    ratio = plain / scaled
    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] == pytest.approx(4.0)
    assert ratio.diff().min() > -1e-5, 'a ramp between'
    # a pair that turns 32 times or more in the original length is fast, one that turns less than once is slow
    turns = 64 * plain / (2 * math.pi)
    assert ratio[turns > 32].numel() == 0 or ratio[turns > 32].max() < 1.05
    assert ratio[turns < 0.5].min() > 3.5


@pytest.mark.parametrize(
    ('config', 'expected'),
    [
        (RopeConfig(1e4), 1.0),
        (RopeConfig(1e4, 'linear', factor=8.0), 1.0),
        (YARN, 0.1 * math.log(4.0) + 1),
        (RopeConfig(1e4, 'yarn', factor=1.0, original_max_position=64), 1.0),
        (RopeConfig(1e4, 'yarn', factor=4.0, original_max_position=64, attention_factor=0.5), 0.5),
        (
            RopeConfig(1e4, 'yarn', factor=4.0, original_max_position=64, mscale=2.0, mscale_all_dim=0.5),
            (0.2 * math.log(4.0) + 1) / (0.05 * math.log(4.0) + 1),
        ),
    ],
)
def test_attention_factor_scales_the_table(config: RopeConfig, expected: float) -> None:
    assert attention_factor(config) == pytest.approx(expected)
    norm = rotary_table(config, 8, 5, CPU)[:, :, :4].pow(2).sum(1).sqrt()
    torch.testing.assert_close(norm, torch.full_like(norm, expected))
