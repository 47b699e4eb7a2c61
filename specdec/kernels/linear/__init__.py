"""Matrix products of packed rows with a weight, and what a decoder layer puts right before and after them.

On a GPU a decode step is bound by reading weights once, so neighbours are folded into the product: the norm in front,
the residual addition or the SwiGLU gate behind. All products accumulate in fp32.
"""

from torch import Tensor

from specdec.kernels.dispatch import Implementations

_implementation = Implementations(__name__, cuda='triton')


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N] -> [..., N] in x's dtype."""
    return _implementation(x.device.type, 'linear')(x, weight, bias)


def head_logits(x: Tensor, weight: Tensor) -> Tensor:
    """linear(x [..., K], weight [V, K]) -> [..., V] fp32; on CUDA the fp32 sums themselves, which hardly ever tie."""
    return _implementation(x.device.type, 'head_logits')(x, weight)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """residual [T, N] + linear(x [T, K]) -> [T, N], new memory."""
    return _implementation(x.device.type, 'linear_add')(x, weight, bias, residual)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """linear(rms_norm(x [T, K], norm [K])) -> [T, N]."""
    return _implementation(x.device.type, 'norm_linear')(x, norm, eps, weight, bias)


def norm_swiglu(x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
    """With y = rms_norm(x [T, K], norm [K]) and gate_up [2 I, K] = (gate, up): silu(gate y) * up y -> [T, I]."""
    return _implementation(x.device.type, 'norm_swiglu')(x, norm, eps, gate_up)
