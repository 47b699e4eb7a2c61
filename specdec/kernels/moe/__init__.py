"""Routed experts: choosing them, and running the chosen ones."""

from dataclasses import dataclass

from torch import Tensor

from specdec.kernels.dispatch import Implementations

_implementation = Implementations(__name__, cuda='triton')


@dataclass(frozen=True, slots=True)
class Fp4Weight:
    """Matrices [E, O, I] in four bits a number: `values` [E, O, I / 2] uint8, two e2m1 numbers a byte, the earlier
    column in its lower half; `scales` [E, O, I / 32] uint8, a byte b standing for 2^(b - 127).
    """

    values: Tensor
    scales: Tensor

    def __getitem__(self, expert: int) -> 'Fp4Weight':
        return Fp4Weight(self.values[expert], self.scales[expert])


Matrices = Tensor | Fp4Weight


def route_top_k(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Softmax over experts in fp32, then the k largest: logits [T, E] -> weights [T, k] fp32, experts [T, k] int64.

    `renormalise` makes the k weights sum to 1. Equal probabilities: the lower expert first.
    """
    return _implementation(logits.device.type, 'route_top_k')(logits, k, renormalise)


def route_sqrt_softplus(
    logits: Tensor, bias: Tensor | None, experts: Tensor | None, k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """DeepSeek-V4's router: logits [T, E] fp32 -> weights [T, k] fp32, experts [T, k] int64.

    s = sqrt(softplus(logit)). The k experts are those with the largest s + bias [E] (the lower one if equal), or the
    given `experts` [T, k]; weights are s, without the bias, over their sum, times `scale`.
    """
    return _implementation(logits.device.type, 'route_sqrt_softplus')(logits, bias, experts, k, scale)


def expert_mlps(
    x: Tensor, gate_up: Matrices, down: Matrices, weights: Tensor, experts: Tensor, limit: float | None = None
) -> Tensor:
    """sum_j weights[t, j] * down_e(silu(gate_e x) * up_e x), e = experts[t, j]: x [T, H] -> [T, H] in x's dtype.

    gate_up [E, 2 I, H] = (gate, up), down [E, H, I], weights [T, k] fp32, experts [T, k] int64. Each product is rounded
    to x's dtype; the k terms are added in the order of j, in fp32. With a `limit` L the gate counts as min(gate, L) and
    up as up clamped to -L .. L. Four-bit matrices give what their numbers in x's dtype would, bit by bit.
    """
    return _implementation(x.device.type, 'expert_mlps')(x, gate_up, down, weights, experts, limit)
