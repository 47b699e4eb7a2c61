"""Rotary position embedding, NeoX halves, with the per-head norms of Qwen3 in front of it."""

from torch import Tensor

from specdec.kernels.dispatch import Implementations

_implementation = Implementations(__name__, cuda='triton')

Rotary = tuple[Tensor, Tensor]  # cos and signed sin of each row


def rotary_rows(cos_sin: Tensor, positions: Tensor) -> Rotary:
    """Rows of a table [P, 2, hd] for positions [T] -> (cos, sin), each [T, 1, hd] fp32.

    The sine's first half is negated in the table, so that x cos + roll(x, hd / 2) sin rotates (a, b) to
    (a cos - b sin, b cos + a sin).
    """
    rows = cos_sin[positions]
    return rows[:, :1], rows[:, 1:]


def head_norm_rotary(x: Tensor, weight: Tensor, eps: float, rotary: Rotary) -> Tensor:
    """Norm each head, then rotate it: x [T, heads, hd], weight [heads, hd] or [hd] -> [T, heads, hd].

    Qwen3 has one norm weight for the query heads and one for the key heads; stacked per head, q and k go in one call.
    Norm as in kernels.norm; the rotation is computed in fp32 and rounded once.
    """
    return _implementation(x.device.type, 'head_norm_rotary')(x, weight, eps, rotary)
