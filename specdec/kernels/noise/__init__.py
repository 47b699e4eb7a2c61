"""The noise of a token: a pure function of (seed, position of the token being drawn, token id, stream).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). Key: the seed's low and high 32
bits. Counter: (id // 4, position, stream, 0); of the four outputs, number id % 4 belongs to the id. Uniform:
u = (n + 1/2) / 2^32 in fp32, at most 1 - 2^-24; Gumbel: -log(-log1p(-u)), fp32.
"""

from torch import Tensor

from specdec.kernels.dispatch import Implementations

_implementation = Implementations(__name__)

PICK, ACCEPT, RESIDUAL, DRAFT = range(4)  # stream words: who uses the noise


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int, stream: int = PICK) -> Tensor:
    """Gumbel values for ids 0 .. vocabulary - 1: seeds [R] (a uint64's bits), positions [R], int64 -> [R, V] fp32."""
    return _implementation(seeds.device.type, 'gumbel')(seeds, positions, vocabulary, stream)


def gumbel_at(seeds: Tensor, positions: Tensor, ids: Tensor, stream: int = PICK) -> Tensor:
    """Gumbel values for given ids [R, n] -> [R, n] fp32; equal to `gumbel` gathered at the ids."""
    return _implementation(seeds.device.type, 'gumbel_at')(seeds, positions, ids, stream)
