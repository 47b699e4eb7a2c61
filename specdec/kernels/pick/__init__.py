"""A row's pick: the largest of logits over temperature plus the noise of (seed, position, id)."""

from torch import Tensor

from specdec.kernels.dispatch import Implementations
from specdec.kernels.noise import Noise

_implementation = Implementations(__name__, cuda='triton')

NO_PICK = -1  # of a row without a value above -inf


def argmax(logits: Tensor) -> Tensor:
    """Id of the largest logit of each row [..., V] fp32 -> [...] int64; the lower if equal; NO_PICK if all are -inf."""
    return _implementation(logits.device.type, 'argmax')(logits)


def noisy_argmax(
    logits: Tensor, temperature: Tensor, threshold: Tensor | None, noise: Noise, ids: Tensor | None = None
) -> Tensor:
    """logits [R, V] fp32, temperature [R] fp32 -> picks [R] int64, columns of the logits; NO_PICK if all are -inf.

    Temperature 0 rows: argmax of the logits. Others: argmax of logits / temperature + Gumbel(seed, position, id), see
    kernels.noise; with `threshold` [R] fp32, only among ids whose logits / temperature reach it. `ids` [V] int64: the
    id of each column, where it is not the column itself.
    """
    return _implementation(logits.device.type, 'noisy_argmax')(logits, temperature, threshold, noise, ids)
