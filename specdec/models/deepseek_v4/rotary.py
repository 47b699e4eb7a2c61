"""Rotation of the last channels of a head in interleaved pairs, with angles computed for the rows of a step.

No table: the model is made for a million positions and has two rotary embeddings.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.layers.rotary import RopeConfig, inverse_frequencies


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos, sin [T, rd / 2] fp32 of T rows."""

    cos: Tensor
    sin: Tensor

    def turn(self, x: Tensor) -> Tensor:
        """Rotate the last rd channels of x [T, d] or [T, heads, d]: (a, b) -> (a cos - b sin, b cos + a sin)."""
        return self._rotate(x, self.sin)

    def turn_back(self, x: Tensor) -> Tensor:
        """The inverse rotation."""
        return self._rotate(x, -self.sin)

    def _rotate(self, x: Tensor, sin: Tensor) -> Tensor:
        cos = self.cos
        if x.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]
        kept = x.shape[-1] - 2 * cos.shape[-1]
        a, b = x[..., kept::2].float(), x[..., kept + 1 :: 2].float()
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        return torch.cat([x[..., :kept], turned.to(x.dtype)], -1)


class PairRotary:
    """Angles of one rotary embedding over `size` channels."""

    def __init__(self, config: RopeConfig, size: int, device: torch.device) -> None:
        self.frequencies = inverse_frequencies(config, size).to(device)

    def at(self, positions: Tensor) -> Rotation:
        """Rotation of rows at positions [T]."""
        angles = positions[:, None].float() * self.frequencies
        return Rotation(angles.cos(), angles.sin())
