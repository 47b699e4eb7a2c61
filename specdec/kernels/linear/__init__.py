"""Matrix product of packed rows with a weight."""

from torch import Tensor

from specdec.kernels.dispatch import Implementations

_implementation = Implementations(__name__)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N] -> [..., N] in x's dtype, accumulated in fp32."""
    return _implementation(x.device.type, 'linear')(x, weight, bias)
