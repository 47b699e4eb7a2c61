"""Token embedding and output head, sharded by vocabulary rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.linear import head_logits
from specdec.layers.parallel import ParallelGroup
from specdec.layers.weights import Destination


class VocabEmbedding:
    """ids [...] -> rows [..., H] of a table [V, H]. Each rank holds V / size rows, the last one what is left."""

    def __init__(
        self, vocabulary: int, size: int, group: ParallelGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.vocabulary, self.group = vocabulary, group
        self.start, count = group.shard(vocabulary)
        self.weight = torch.empty(count, size, dtype=dtype, device=device)

    def __call__(self, ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(ids, self.weight)
        if not len(self.weight):
            return self.group.all_reduce(self.weight.new_zeros(*ids.shape, self.weight.shape[1]))
        local = ids - self.start
        mine = (local >= 0) & (local < self.weight.shape[0])
        rows = F.embedding(torch.where(mine, local, 0), self.weight)
        return self.group.all_reduce(torch.where(mine[..., None], rows, 0))

    def equals(self, theirs: Tensor) -> bool:
        """Whether a whole table [V, H] is this one, judged in its dtype; the ranks agree about the answer."""
        if tuple(theirs.shape) != (self.vocabulary, self.weight.shape[1]):
            return False
        mine = self.weight.to(dtype=theirs.dtype, device=theirs.device)
        same = torch.equal(theirs[self.start : self.start + len(mine)], mine)
        return bool(self.group.smallest(int(same), self.weight.device))

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
    """hidden [..., H] -> logits [..., V] fp32, on every rank. A tied head is given the embedding's table.

    `table`: rows of the vocabulary, this rank's share of them; or the whole matrix [V, H], if it is not shared out.
    """

    def __init__(self, table: VocabEmbedding | Tensor) -> None:
        self.table = table if isinstance(table, VocabEmbedding) else None
        self.weight = table.weight if isinstance(table, VocabEmbedding) else table

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = head_logits(hidden, self.weight)
        if self.table is None or self.table.group.size == 1:
            return logits
        group, vocabulary = self.table.group, self.table.vocabulary
        each = -(-vocabulary // group.size)
        return group.all_gather(F.pad(logits, (0, each - logits.shape[-1])))[..., :vocabulary]
