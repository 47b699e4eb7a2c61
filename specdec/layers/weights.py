"""Where a checkpoint tensor goes: what every layer declares and models/weights.py fills."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rearranged:
    """A checkpoint tensor of `shape` that lies in memory in another order or form; `accept` writes it there."""

    shape: tuple[int, ...]
    accept: Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class Destination:
    """`view` is the memory this rank holds for a checkpoint tensor of `shape`: rows start .. start + n of `dim`.

    `view` has the tensor's own shape except along `dim` (None = the whole tensor). dtype and device may differ.
    """

    view: Tensor
    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0

    @property
    def part(self) -> tuple[slice, ...] | None:
        """What this rank holds of the tensor, as an index; None: all of it."""
        if self.dim is None or self.view.shape[self.dim] == self.shape[self.dim]:
            return None
        return (slice(None),) * self.dim + (slice(self.start, self.start + self.view.shape[self.dim]),)

    def accept(self, tensor: Tensor) -> None:
        """The whole tensor, or this rank's part of it."""
        part = self.part
        self.view.copy_(tensor if part is None or tensor.shape == self.view.shape else tensor[part])


Place = Destination | Rearranged
