"""RMS norms as DeepSeek-V4 has them: weights stay fp32, everything is computed in fp32 and rounded once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.layers.weights import Destination


class WideNorm:
    """w x / rms(x) over the last dimension, w [D] fp32; the result has x's dtype."""

    def __init__(self, size: int, eps: float, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=torch.float32, device=device)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)

    def weights(self, name: str) -> dict[str, Destination]:
        return {f'{name}.weight': Destination(self.weight, tuple(self.weight.shape))}


def plain_norm(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension; no weight."""
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)
