"""Weights from (name, tensor) pairs into the modules' memory, and the account of what was used.

A module declares where each checkpoint tensor goes (`weights()` -> name: Place). A WeightLoader is fed any number
of times, in any order, one tensor at a time, so that loading needs the model's own memory and one tensor more; `finish`
fails by name on anything missing, unexpected, doubled or misshapen. Next: models/checkpoint.py, where pairs come from.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from specdec.errors import CheckpointError
from specdec.layers.weights import Destination, Place


@dataclass(frozen=True, slots=True)
class Decision:
    """A tensor that is looked at, not copied: `accept(tensor)` decides what becomes of it (a shared head, say)."""

    shape: tuple[int, ...]
    accept: Callable[[Tensor], None]
    optional: bool = True


@dataclass(slots=True)
class WeightLoader:
    """Feeds `destinations` and keeps the account. `ignore` are regular expressions for names that are known noise."""

    destinations: Mapping[str, Place | Decision]
    ignore: tuple[str, ...] = ()
    where: str = 'checkpoint'
    used: set[str] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)
    unexpected: set[str] = field(default_factory=set)

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in pairs:
            self._take(name, tensor)

    def _take(self, name: str, tensor: Tensor) -> None:
        destination = self.destinations.get(name)
        if destination is None:
            ignorable = any(re.fullmatch(pattern, name) for pattern in self.ignore)
            (self.ignored if ignorable else self.unexpected).add(name)
            return
        if name in self.used:
            raise CheckpointError(name, self.where, 'this tensor appears twice in the checkpoint')
        partial = isinstance(destination, Destination) and destination.part is not None
        if tuple(tensor.shape) != destination.shape and not (partial and tensor.shape == destination.view.shape):
            raise CheckpointError(
                name, tuple(tensor.shape), f'config.json implies shape {destination.shape} ({self.where})'
            )
        destination.accept(tensor)
        self.used.add(name)

    def part(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
        """What has to be read of a tensor of this shape, as an index; None: all of it."""
        destination = self.destinations.get(name)
        fits = isinstance(destination, Destination) and destination.shape == shape
        return destination.part if fits else None

    def missing(self) -> list[str]:
        optional = {n for n, d in self.destinations.items() if isinstance(d, Decision) and d.optional}
        return sorted(set(self.destinations) - self.used - optional)

    def finish(self) -> None:
        """Raise CheckpointError unless every tensor found its place and every place its tensor."""
        if missing := self.missing():
            raise CheckpointError('tensors', listed(missing), f'missing from {self.where}')
        if self.unexpected:
            raise CheckpointError(
                'tensors', listed(sorted(self.unexpected)), f'{self.where} has tensors that this model has no use for'
            )


def listed(names: Sequence[str], limit: int = 5) -> str:
    """'a, b and 7 more': names for a one-line message."""
    return ', '.join(names[:limit]) + (f' and {len(names) - limit} more' if len(names) > limit else '')
