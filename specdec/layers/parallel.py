"""The ranks that share a layer. Every sharded layer takes a ParallelGroup; a group of one costs nothing.

Collectives leave the same bits on every rank, so what all of them compute from such a result stays equal without
further talk. engine/distributed.py makes the groups.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ParallelGroup:
    """`rank` of `size` ranks; `handle` is the process group that talks to the others, None for a group of one."""

    rank: int = 0
    size: int = 1
    handle: 'dist.ProcessGroup | None' = None

    def shard(self, total: int) -> tuple[int, int]:
        """(start, count) of this rank's part of `total` units: equal parts, but that the last ones may be short."""
        each = -(-total // self.size)
        start = min(self.rank * each, total)
        return start, min(each, total - start)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.handle is not None:
            self.handle.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors, of one shape, side by side along the last dimension."""
        if self.handle is None:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.handle.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, -1)

    def smallest(self, value: int, device: torch.device) -> int:
        """The smallest of the ranks' values. Waits for the device: for start-up only."""
        if self.handle is None:
            return value
        found, options = torch.tensor([value], device=device), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self.handle.allreduce([found], options).wait()
        return int(found[0])


SINGLE = ParallelGroup()
