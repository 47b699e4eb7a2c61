"""RMS norm, alone and fused with the residual addition before it."""

from torch import Tensor

from specdec.kernels.dispatch import Implementations

_implementation = Implementations(__name__)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension: x [..., D], weight [D] -> [..., D] in x's dtype.

    The mean of squares is taken in fp32; the quotient is rounded to x's dtype, then multiplied by the weight.
    """
    return _implementation(x.device.type, 'rms_norm')(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual) for x, residual [T, D]; both results are new memory."""
    return _implementation(x.device.type, 'add_rms_norm')(x, residual, weight, eps)
