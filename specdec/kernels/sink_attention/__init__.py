"""Attention of rows over a ring's window and compressed entries, one latent head serving as key and value, with sinks.

One softmax over everything a row sees and one learned logit per head that takes mass and gives nothing.
Formulas: docs/deepseek_v4.md, section "Attention".
"""

from dataclasses import dataclass

from torch import Tensor

from specdec.kernels.compressor import Entries
from specdec.kernels.dispatch import Implementations
from specdec.kernels.ring import Sources

_implementation = Implementations(__name__, cuda='triton')


@dataclass(frozen=True, slots=True)
class Compressed:
    """Entries of pages [P, n, d] that rows attend to beside their window."""

    pages: Tensor
    entries: Entries


def sink_attention(
    q: Tensor, fresh: Tensor, ring: Tensor, window: Sources, compressed: Compressed | None, sinks: Tensor, scale: float
) -> Tensor:
    """q [T, H, d], the step's own latent rows fresh [F, d], ring [S, R, d], window [T, L], sinks [H] fp32 -> [T, H, d].

    Scores and sums are fp32, rounded to q's dtype once. Every row sees at least one key.
    """
    attend = _implementation(q.device.type, 'sink_attention')
    return attend(q, fresh, ring, window, compressed, sinks, scale)
