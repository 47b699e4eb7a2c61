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

    def gather(self, columns: Tensor) -> Tensor:
        """Something of each of this rank's rows [..., n] -> of every row [..., V]."""
        if self.group.size == 1:
            return columns
        each = -(-self.vocabulary // self.group.size)
        return self.group.all_gather(F.pad(columns, (0, each - columns.shape[-1])))[..., : self.vocabulary]

    def weights(self, name: str) -> dict[str, Destination]:
        shape = (self.vocabulary, self.weight.shape[1])
        return {f'{name}.weight': Destination(self.weight, shape, 0, self.start)}


class Table:
    """ids [...] -> rows [..., H] of a whole table [V, H] that nobody shares out."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)

    def equals(self, theirs: Tensor) -> bool:
        """Whether a table [V, H] is this one, judged in its dtype."""
        mine = self.weight.to(dtype=theirs.dtype, device=theirs.device)
        return theirs.shape == mine.shape and torch.equal(theirs, mine)

    def gather(self, columns: Tensor) -> Tensor:
        return columns


class Head:
    """hidden [..., H] -> logits [..., V] fp32, on every rank, by the rows of a table; a tied one is the embedding's."""

    def __init__(self, table: VocabEmbedding | Table) -> None:
        self.table, self.weight = table, table.weight

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.table.gather(head_logits(hidden, self.weight))
