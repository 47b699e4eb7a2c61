"""Hyper-connections: N residual streams, mixed into one input of a sublayer and out again (DeepSeek-V4's mHC).

Formulas: docs/deepseek_v4.md, section "Hyper-connections", after modeling_deepseek_v4.py of transformers 5.24.
"""

from dataclasses import dataclass

from torch import Tensor

from specdec.kernels.dispatch import Implementations

_implementation = Implementations(__name__, cuda='triton')


@dataclass(frozen=True, slots=True)
class MixWeights:
    """fn [M, N * D], base [M], scale [3] or [1], all fp32; M = (2 + N) N for a sublayer (N `pre`, N `post`, N x N
    `comb` row by row), N for the head. `norm_eps` belongs to the norm in front of the projection, `eps` to the weights.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm_eps: float
    eps: float
    iterations: int


def collapse(streams: Tensor, weights: MixWeights) -> tuple[Tensor, Tensor, Tensor]:
    """streams [T, N, D] -> sublayer input [T, D] in their dtype, post [T, N] and comb [T, N, N] fp32."""
    return _implementation(streams.device.type, 'collapse')(streams, weights)


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams [T, N, D]: post[k] y + sum_j comb[j, k] streams[j], in fp32, rounded once; y [T, D]."""
    return _implementation(streams.device.type, 'expand')(y, streams, post, comb)


def collapse_head(streams: Tensor, weights: MixWeights) -> Tensor:
    """streams [T, N, D] -> [T, D]: the final mix, which has no post and no comb."""
    return _implementation(streams.device.type, 'collapse_head')(streams, weights)
