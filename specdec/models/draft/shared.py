"""The target's embedding and head as a draft uses them, or the draft's own where the file's differ.

A copy in the file that equals the target's, compared in the file's dtype, is dropped; one that differs is kept.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.layers.embedding import Head, Table, VocabEmbedding
from specdec.layers.weights import Destination
from specdec.models.weights import Decision


class OwnTable:
    """Embedding rows by target id."""

    def __init__(
        self, shared: VocabEmbedding | Table, vocabulary: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shared, self.shape, self.dtype, self.device = shared, (vocabulary, size), dtype, device
        self.own: Tensor | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        return self.shared(ids) if self.own is None else F.embedding(ids, self.own)

    def weights(self, name: str) -> dict[str, Decision]:
        return {f'{name}.weight': Decision(self.shape, self._decide)}

    def _decide(self, tensor: Tensor) -> None:
        if not self.shared.equals(tensor):
            self.own = tensor.to(dtype=self.dtype, device=self.device)


class OwnHead:
    """Logits over draft ids. A reduced vocabulary always has its own weight; else the target's serves if equal."""

    def __init__(
        self, shared: Head, vocabulary: int, size: int, reduced: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shared, self.shape, self.dtype, self.device = shared.table, (vocabulary, size), dtype, device
        self.head = shared
        if reduced:
            self.head = Head(Table(torch.empty(self.shape, dtype=dtype, device=device)))

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.head(hidden.to(self.head.weight.dtype))

    def weights(self, name: str) -> dict[str, Destination | Decision]:
        if self.head.table is self.shared:
            return {f'{name}.weight': Decision(self.shape, self._decide)}
        return {f'{name}.weight': Destination(self.head.weight, self.shape)}

    def _decide(self, tensor: Tensor) -> None:
        if not self.shared.equals(tensor):
            self.head = Head(Table(tensor.to(dtype=self.dtype, device=self.device)))
