"""Philox4x32-10 in plain torch: 32-bit words live in int64 tensors, whose products wrap modulo 2^64."""

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds on broadcastable int64 tensors holding 32-bit words; four such words come back."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        high0 = ((product0 >> 32) & WORD) ^ (c3 ^ k1)
        high1 = ((product1 >> 32) & WORD) ^ (c1 ^ k0)
        c0, c1, c2, c3 = high1, product1.bitwise_and_(WORD), high0, product0.bitwise_and_(WORD)
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int, streams: Tensor | int) -> Tensor:
    quads = torch.arange(-(-vocabulary // 4), device=seeds.device)
    words = torch.stack(_words(seeds, positions, quads[None], streams), -1)
    return _gumbel_of(words.flatten(1)[:, :vocabulary])


def gumbel_at(seeds: Tensor, positions: Tensor, ids: Tensor, streams: Tensor | int) -> Tensor:
    ids = ids.expand(seeds.shape[0], ids.shape[-1])
    words = torch.stack(_words(seeds, positions, ids >> 2, streams), -1)
    return _gumbel_of(words.gather(-1, (ids & 3)[..., None]).squeeze(-1))


def uniform(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    return _uniform_of(_words(seeds, positions, torch.zeros_like(seeds)[:, None], stream)[0]).squeeze(1)


def _words(seeds: Tensor, positions: Tensor, quads: Tensor, streams: Tensor | int) -> tuple[Tensor, ...]:
    position, seed = positions[:, None], seeds[:, None]
    stream = torch.full_like(position, streams) if isinstance(streams, int) else streams[:, None]
    counter = (quads, position & WORD, stream & WORD, (stream >> 32) & WORD)
    return philox(counter, (seed & WORD, (seed >> 32) & WORD))


def _uniform_of(words: Tensor) -> Tensor:
    return ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def _gumbel_of(words: Tensor) -> Tensor:
    return -torch.log(-torch.log1p(-_uniform_of(words)))
