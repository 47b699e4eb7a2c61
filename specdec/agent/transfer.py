"""Small data across the bus without waiting: lists to the device, results back to the host.

On CUDA both directions go through pinned memory of torch's caching allocator, which reuses a block only once the copy
that used it is done; on CPU nothing is copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def to_device(values: Sequence[object], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A (nested) list of numbers as a tensor on the device, ordered on the current stream."""
    if device.type == 'cpu':
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def tensor_to_device(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, ordered on the current stream."""
    return values if device.type == 'cpu' else values.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Tensors on their way to the host; `wait` returns them once they have arrived."""

    tensors: tuple[Tensor, ...]
    arrived: torch.cuda.Event | None

    def wait(self) -> tuple[Tensor, ...]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tensors


def to_host(tensors: Sequence[Tensor], device: torch.device) -> HostCopy:
    """Start copying results to the host, behind everything launched on the current stream."""
    if device.type == 'cpu':
        return HostCopy(tuple(tensors), None)
    copies = []
    for tensor in tensors:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copies.append(copy.copy_(tensor, non_blocking=True))
    arrived = torch.cuda.Event()
    arrived.record()
    return HostCopy(tuple(copies), arrived)
