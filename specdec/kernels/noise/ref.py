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
        high0, high1 = (product0 >> 32) & WORD, (product1 >> 32) & WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & WORD, high0 ^ c3 ^ k1, product0 & WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int, stream: int) -> Tensor:
    quads = torch.arange(-(-vocabulary // 4), device=seeds.device)
    words = torch.stack(_words(seeds, positions, quads[None], stream), -1)
    return _gumbel_of(words.flatten(1)[:, :vocabulary])


def gumbel_at(seeds: Tensor, positions: Tensor, ids: Tensor, stream: int) -> Tensor:
    words = torch.stack(_words(seeds, positions, ids >> 2, stream), -1)
    return _gumbel_of(words.gather(-1, (ids & 3)[..., None]).squeeze(-1))


def _words(seeds: Tensor, positions: Tensor, quads: Tensor, stream: int) -> tuple[Tensor, ...]:
    position = positions[:, None]
    counter = (quads, position & WORD, torch.full_like(position, stream), torch.zeros_like(position))
    return philox(counter, (seeds[:, None] & WORD, (seeds[:, None] >> 32) & WORD))


def _gumbel_of(words: Tensor) -> Tensor:
    uniform = ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))
