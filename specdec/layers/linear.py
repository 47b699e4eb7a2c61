"""Linear layers that know which rows or columns of a checkpoint's matrix this rank holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.linear import linear, linear_add
from specdec.layers.parallel import ParallelGroup
from specdec.layers.weights import Destination


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint matrix among several fused by rows: `total` rows, `count` of them from `start` on this rank."""

    total: int
    start: int
    count: int

    @classmethod
    def of(cls, total: int, group: ParallelGroup, unit: int = 1) -> 'Part':
        """Split `total` rows evenly in units (a head's rows, say). Where there are fewer units than ranks, several
        ranks hold the same one.
        """
        units = total // unit
        if units < group.size:
            return cls(total, group.rank * units // group.size * unit, unit)
        start, count = group.shard(units)
        return cls(total, start * unit, count * unit)


class ColumnLinear:
    """This rank's outputs of one or several fused matrices [rows, inputs]."""

    def __init__(
        self, inputs: int, parts: Sequence[Part], bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.inputs, self.parts = inputs, tuple(parts)
        rows = sum(part.count for part in parts)
        self.weight = torch.empty(rows, inputs, dtype=dtype, device=device)
        self.bias = torch.empty(rows, dtype=dtype, device=device) if bias else None

    def weights(self, *names: str) -> dict[str, Destination]:
        """Checkpoint names of the fused matrices, in order."""
        found, row = {}, 0
        for name, part in zip(names, self.parts, strict=True):
            rows = slice(row, row + part.count)
            found[f'{name}.weight'] = Destination(self.weight[rows], (part.total, self.inputs), 0, part.start)
            if self.bias is not None:
                found[f'{name}.bias'] = Destination(self.bias[rows], (part.total,), 0, part.start)
            row += part.count
        return found


class RowLinear:
    """residual [T, N] + this rank's inputs [T, K / size] times its columns, summed over the ranks -> [T, N]."""

    def __init__(
        self, part: Part, outputs: int, bias: bool, group: ParallelGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.part, self.outputs, self.group = part, outputs, group
        self.weight = torch.empty(outputs, part.count, dtype=dtype, device=device)
        self.bias = torch.empty(outputs, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        if self.group.rank == 0:  # one rank brings what must be added once
            return self.group.all_reduce(linear_add(x, self.weight, self.bias, residual))
        return self.group.all_reduce(linear(x, self.weight))

    def weights(self, name: str) -> dict[str, Destination]:
        found = {f'{name}.weight': Destination(self.weight, (self.outputs, self.part.total), 1, self.part.start)}
        if self.bias is not None:
            found[f'{name}.bias'] = Destination(self.bias, (self.outputs,))
        return found
