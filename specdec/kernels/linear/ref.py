"""The products in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import linear

from specdec.kernels.norm.ref import rms_norm

__all__ = ['head_logits', 'linear', 'linear_add', 'norm_linear', 'norm_swiglu']


def head_logits(x: Tensor, weight: Tensor) -> Tensor:
    return linear(x, weight).float()


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    return torch.addmm(residual if bias is None else residual + bias, x, weight.t())


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(rms_norm(x, norm, eps), weight, bias)


def norm_swiglu(x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
    gate, up = linear(rms_norm(x, norm, eps), gate_up).chunk(2, -1)
    return F.silu(gate) * up
