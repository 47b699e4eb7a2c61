"""The ranks that share a layer. Every sharded layer takes a ParallelGroup; a group of one costs nothing."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ParallelGroup:
    """`rank` of `size` ranks; `handle` is the torch.distributed group, None for a group of one."""

    rank: int = 0
    size: int = 1
    handle: 'dist.ProcessGroup | None' = None

    def shard(self, total: int) -> tuple[int, int]:
        """(start, count) of this rank's part of `total` equal units."""
        count = total // self.size
        return self.rank * count, count

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.handle)
        return x


SINGLE = ParallelGroup()
