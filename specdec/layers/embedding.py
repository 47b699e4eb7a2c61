"""Token embedding and output head, sharded by vocabulary rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.linear import head_logits
from specdec.layers.parallel import ParallelGroup
from specdec.layers.weights import Destination


class VocabEmbedding:
    """ids [...] -> rows [..., H] of a table [V, H]. Each rank holds V / size rows."""

    def __init__(
        self, vocabulary: int, size: int, group: ParallelGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.vocabulary, self.group = vocabulary, group
        self.start, count = group.shard(vocabulary)
        self.weight = torch.empty(count, size, dtype=dtype, device=device)

    def __call__(self, ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.start
        mine = (local >= 0) & (local < self.weight.shape[0])
        rows = F.embedding(torch.where(mine, local, 0), self.weight)
        return self.group.all_reduce(torch.where(mine[..., None], rows, 0))

    def weights(self, name: str) -> dict[str, Destination]:
        shape = (self.vocabulary, self.weight.shape[1])
        return {f'{name}.weight': Destination(self.weight, shape, 0, self.start)}


class Table:
    """ids [...] -> rows [..., H] of a whole table [V, H] that somebody else owns."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Head:
    """hidden [..., H] -> logits [..., V] fp32. A tied head is given the embedding's weight."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, hidden: Tensor) -> Tensor:
        return head_logits(hidden, self.weight)
