"""What the engine asks of a target model: rows in, hidden states and taps out. Next: models/qwen3.py.

A target declares its weights and its caches, and is handed what its spec allocated; it knows nothing of requests,
sampling or drafts. Taps are an output it declares: the residual stream after the layers that the draft asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from specdec.kernels.paged_attention import RowLayout
from specdec.layers.cache_specs import CacheSpec
from specdec.layers.embedding import Head, VocabEmbedding
from specdec.layers.weights import Place


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed rows of one forward: ids [T], positions [T], cache entries to write `slots` [T]; `request_slots` [B]: the
    slot of each request, where state that is not paged lies; all int64.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    request_slots: Tensor
    layout: RowLayout


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """hidden [T, H] after the final norm; taps [T, m * H], raw residual streams in tap order, None without taps."""

    hidden: Tensor
    taps: Tensor | None


class TargetModel(Protocol):
    vocab_size: int
    hidden_size: int
    num_layers: int
    embedding: VocabEmbedding
    head: Head

    def cache_spec(self, num_drafts: int = 0, /) -> CacheSpec:
        """What it keeps where steps verify up to `num_drafts` drafts (K)."""

    def weights(self) -> Mapping[str, Place]: ...

    def forward(self, rows: Rows, cache: Any) -> TargetOutput: ...
