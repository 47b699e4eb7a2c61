"""The weight of an RMS norm. Layers that fuse the norm into a product read `weight` and `eps`; others call it."""

import torch
from torch import Tensor

from specdec.kernels.norm import rms_norm
from specdec.layers.weights import Destination


class RmsNorm:
    """Plain Qwen3 norm: weight w, not 1 + w."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def weights(self, name: str) -> dict[str, Destination]:
        return {f'{name}.weight': Destination(self.weight, tuple(self.weight.shape))}
