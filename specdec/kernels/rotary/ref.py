"""Head norm and rotation in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.rotary import Rotary


def head_norm_rotary(x: Tensor, weight: Tensor, eps: float, rotary: Rotary) -> Tensor:
    cos, sin = rotary
    normed = (F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype) * weight).to(x.dtype).float()
    return torch.addcmul(normed * cos, normed.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)
