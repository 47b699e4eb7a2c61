"""A row's pick: the largest of logits over temperature plus the noise of (seed, position, id)."""

from torch import Tensor

from specdec.kernels.dispatch import Implementations

_implementation = Implementations(__name__, cuda='triton')


def argmax(logits: Tensor) -> Tensor:
    """Id of the largest logit of each row [..., V] fp32 -> [...] int64; the lower id if equal."""
    return _implementation(logits.device.type, 'argmax')(logits)


def noisy_argmax(
    logits: Tensor, temperature: Tensor, threshold: Tensor | None, seeds: Tensor, positions: Tensor, stream: int
) -> Tensor:
    """logits [R, V] fp32, temperature [R] fp32 -> picks [R] int64.

    Temperature 0 rows: argmax of the logits. Others: argmax of logits / temperature + Gumbel(seed, position, id), see
    kernels.noise; with `threshold` [R] fp32, only among ids whose logits / temperature reach it.
    """
    pick = _implementation(logits.device.type, 'noisy_argmax')
    return pick(logits, temperature, threshold, seeds, positions, stream)
