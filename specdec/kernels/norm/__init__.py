"""RMS norm of rows."""

from torch import Tensor

from specdec.kernels.dispatch import Implementations

_implementation = Implementations(__name__, cuda='triton')


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension: x [..., D], weight [D], in x's dtype or fp32 -> [..., D] in x's dtype.

    The mean of squares is taken in fp32; the quotient is rounded to x's dtype, then multiplied by the weight.
    """
    return _implementation(x.device.type, 'rms_norm')(x, weight, eps)
