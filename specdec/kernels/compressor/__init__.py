"""Compressed entries: one key for every r tokens, a softmax-weighted sum per channel over a window of projected rows.

A row carries two halves, C and Z (Z already has the bias of its place in the window). With `overlap` each half has two
series and the window is 2 r rows: series A of the r rows before, series B of the entry's own r rows.
Formulas: docs/deepseek_v4.md, section "Compressed entries".
"""

from dataclasses import dataclass

from torch import Tensor

from specdec.kernels.dispatch import Implementations
from specdec.kernels.ring import Sources

_implementation = Implementations(__name__)


@dataclass(frozen=True, slots=True)
class Entries:
    """What each of T rows sees: the first counts[t] of row rows[t] of `flat` [R, E], flat entries of pages."""

    flat: Tensor
    rows: Tensor
    counts: Tensor


def compress(ring: Tensor, fresh: Tensor, windows: Sources, overlap: bool) -> Tensor:
    """Sums of N windows, neither normed nor rotated -> [N, w] fp32.

    ring [S, R, 2 c w] and fresh [T, 2 c w] fp32, c = 2 with `overlap`, else 1; `windows` [N, c r], oldest row first.
    Rows before a sequence's beginning are not visible and weigh nothing.
    """
    return _implementation(ring.device.type, 'compress')(ring, fresh, windows, overlap)


def write_entries(pages: Tensor, entries: Tensor, targets: Tensor) -> None:
    """Entries [N, w] to the flat entries `targets` [N] of pages [P, n, w]; any number of them may go to page 0."""
    _implementation(pages.device.type, 'write_entries')(pages, entries, targets)
