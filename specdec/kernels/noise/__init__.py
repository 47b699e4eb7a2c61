"""The noise of a token: a pure function of (seed, position of the token being drawn, token id, stream).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). Key: the seed's low and high 32
bits. Counter: (id // 4, position, stream, salt); of the four outputs, number id % 4 belongs to the id. Uniform:
u = (n + 1/2) / 2^32 in fp32, at most 1 - 2^-24; Gumbel: -log(-log1p(-u)), fp32. The salt is 0 but for probabilistic
drafts, where it is the anchor's position: a position that is drafted again gets fresh noise.
"""

from dataclasses import dataclass

from torch import Tensor

from specdec.kernels.dispatch import Implementations

_implementation = Implementations(__name__)

PICK, ACCEPT, RESIDUAL, DRAFT = range(4)  # stream words: who uses the noise


@dataclass(frozen=True, slots=True)
class Noise:
    """Keys of R rows, [R] int64: seeds (a uint64's bits), positions; streams = stream + 2^32 * salt, None: PICK."""

    seeds: Tensor
    positions: Tensor
    streams: Tensor | None = None


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int, streams: Tensor | int = PICK) -> Tensor:
    """Gumbel values for ids 0 .. vocabulary - 1: seeds, positions [R] int64; streams as in Noise -> [R, V] fp32."""
    return _implementation(seeds.device.type, 'gumbel')(seeds, positions, vocabulary, streams)


def gumbel_at(seeds: Tensor, positions: Tensor, ids: Tensor, streams: Tensor | int = PICK) -> Tensor:
    """Gumbel values for given ids [R, n] or [n] -> [R, n] fp32; equal to `gumbel` gathered at the ids."""
    return _implementation(seeds.device.type, 'gumbel_at')(seeds, positions, ids, streams)


def uniform(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """One uniform number in (0, 1) per row, that of id 0: seeds, positions [R] -> [R] fp32."""
    return _implementation(seeds.device.type, 'uniform')(seeds, positions, stream)
