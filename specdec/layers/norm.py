"""The weight of an RMS norm. Layers that fuse the norm into a product read `weight` and `eps`; others call it."""

import torch
from torch import Tensor

from specdec.kernels.norm import rms_norm
from specdec.layers.weights import Destination, Place, Rearranged


class RmsNorm:
    """Qwen3's norm: weight w."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def weights(self, name: str) -> dict[str, Place]:
        return {f'{name}.weight': Destination(self.weight, tuple(self.weight.shape))}


class CenteredNorm(RmsNorm):
    """Qwen3-Next's norm: checkpoints hold w and mean 1 + w, which is kept in fp32 since bf16 would round it away."""

    def __init__(self, size: int, eps: float, device: torch.device) -> None:
        super().__init__(size, eps, torch.float32, device)

    def weights(self, name: str) -> dict[str, Place]:
        return {f'{name}.weight': Rearranged(tuple(self.weight.shape), self._accept)}

    def _accept(self, tensor: Tensor) -> None:
        self.weight.copy_(tensor.float() + 1)
