"""The gates in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.norm.ref import rms_norm


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    heads = x.shape[0], -1, weight.shape[0]
    normed = rms_norm(x.reshape(heads), weight, eps)
    return (normed.float() * F.silu(gate.reshape(heads).float())).to(x.dtype).view(x.shape)


def sigmoid_gate(x: Tensor, gate: Tensor, residual: Tensor | None = None) -> Tensor:
    gated = x.float() * torch.sigmoid(gate.float())
    return (gated if residual is None else gated + residual.float()).to(x.dtype)
