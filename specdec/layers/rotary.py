"""Rotary tables: the angles of every position, computed once in fp32."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base `theta`; `kind` 'default', 'linear' or 'yarn' (https://arxiv.org/abs/2309.00071).

    Only the first `partial` of a head's channels are rotated, their halves as if they were all. The fields between
    `kind` and it are read only by the kinds that scale. `attention_factor` None means the kind's own
    (yarn: 0.1 ln(factor) + 1).
    """

    theta: float
    kind: Literal['default', 'linear', 'yarn'] = 'default'
    factor: float = 1.0
    original_max_position: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial: float = 1.0


def rotary_table(config: RopeConfig, head_dim: int, positions: int, device: torch.device) -> Tensor:
    """cos and signed sin for positions 0 .. positions - 1 -> [positions, 2, head_dim] fp32.

    Halves are NeoX's; the sine's first half is negated (kernels.rotary). With a partial rotation the channels must lie
    as `rotary_order` says. YaRN: https://arxiv.org/abs/2309.00071, the attention factor scales cos and sin.
    """
    inverse, scale = inverse_frequencies(config, head_dim), attention_factor(config)
    if (still := head_dim // 2 - len(inverse)) > 0:
        factors = torch.full(inverse.shape, scale)
        inverse, scale = F.pad(inverse, (0, still)), F.pad(factors, (0, still), value=1.0)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse[None]
    cos, sin = angles.cos() * scale, angles.sin() * scale
    table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
    return table.to(device)


def rotary_order(config: RopeConfig, head_dim: int) -> list[int]:
    """Where each channel of a head comes from, so that those rotated together lie half a head apart.

    A rotation of a part pairs channels i and i + partial / 2; queries and keys may be permuted alike, since only their
    products count.
    """
    rotated, half = int(head_dim * config.partial), head_dim // 2
    turn, split = rotated // 2, rotated + half - rotated // 2
    return [*range(turn), *range(rotated, split), *range(turn, rotated), *range(split, head_dim)]


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each rotated pair [head_dim * partial / 2] fp32."""
    head_dim = int(head_dim * config.partial)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / config.theta**exponents
    if config.kind == 'default':
        return plain
    if config.kind == 'linear':
        return plain / config.factor
    return _yarn(config, head_dim, plain)


def attention_factor(config: RopeConfig) -> float:
    """What cos and sin are multiplied by; 1 except for YaRN."""
    if config.kind != 'yarn':
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _mscale(config.factor, config.mscale) / _mscale(config.factor, config.mscale_all_dim)
    return _mscale(config.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(config: RopeConfig, head_dim: int, plain: Tensor) -> Tensor:
    """Fast dimensions keep their frequency, slow ones are divided by the factor, a ramp lies between."""
    assert config.original_max_position is not None

    def dimension(rotations: float) -> float:
        period = config.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(period) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / config.factor * ramp + plain * (1 - ramp)
