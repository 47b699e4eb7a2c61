"""The noise of a token on a GPU; words and layout as kernels.noise states them."""

import triton
import triton.language as tl


@triton.jit
def _round(c0, c1, c2, c3, k0, k1):
    m0, m1 = tl.full((), 0xD2511F53, tl.uint32), tl.full((), 0xCD9E8D57, tl.uint32)
    high0, high1 = tl.umulhi(m0, c0), tl.umulhi(m1, c2)
    return high1 ^ c1 ^ k0, m1 * c2, high0 ^ c3 ^ k1, m0 * c0


@triton.jit
def _gumbel_of(word):
    """-log(-log1p(-u)); near 0 the inner logarithm is a series, for there the largest values come from."""
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * (0.25 + u * 0.2))))
    return -tl.log(tl.where(u < 0.015625, series, -tl.log(1.0 - u)))


@triton.jit
def _philox(c0, c1, c2, c3, seed):
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
        k0 = k0 + tl.full((), 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full((), 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def gumbel_tile(seed, position, quads, stream, TILE: tl.constexpr):
    """Gumbel values of ids 4 q .. 4 q + 3 for each q of `quads` [TILE / 4] int32 -> [TILE]; the rest are int64 scalars,
    `stream` with the salt above its low word.
    """
    c0 = quads.to(tl.uint32)
    zero = c0 * 0
    c1 = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero + (stream & 0xFFFFFFFF).to(tl.uint32)
    c3 = zero + ((stream >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0, c1, c2, c3 = _philox(c0, c1, c2, c3, seed)
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3))  # [q, 2, 2], in the order of the ids once it is flat
    return _gumbel_of(tl.reshape(words, (TILE,)))


@triton.jit
def gumbel_at_ids(seed, position, ids, stream):
    """Gumbel values of ids of any shape (int64); seed, position and stream int64 of shapes that broadcast to it."""
    c0 = ((ids >> 2) & 0xFFFFFFFF).to(tl.uint32)
    zero = c0 * 0
    seed = seed + ids * 0
    c1 = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero + (stream & 0xFFFFFFFF).to(tl.uint32)
    c3 = zero + ((stream >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0, c1, c2, c3 = _philox(c0, c1, c2, c3, seed)
    lane = ids & 3
    return _gumbel_of(tl.where(lane < 2, tl.where(lane == 0, c0, c1), tl.where(lane == 2, c2, c3)))
