"""Hyper-connections in plain torch, fp32 inside."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.hyper_connections import MixWeights


def collapse(streams: Tensor, weights: MixWeights) -> tuple[Tensor, Tensor, Tensor]:
    n, (scale_pre, scale_post, scale_comb) = streams.shape[1], weights.scale.unbind()
    wide = streams.float()
    pre, post, comb = _project(wide, weights).split([n, n, n * n], -1)
    base_pre, base_post, base_comb = weights.base.split([n, n, n * n])
    pre = torch.sigmoid(pre * scale_pre + base_pre) + weights.eps
    post = 2 * torch.sigmoid(post * scale_post + base_post)
    comb = (comb * scale_comb + base_comb).view(-1, n, n).softmax(-1) + weights.eps
    return _mix(wide, pre).to(streams.dtype), post, _doubly_stochastic(comb, weights)


def _doubly_stochastic(comb: Tensor, weights: MixWeights) -> Tensor:
    """Sinkhorn's iterations, which begin and end with the columns."""
    comb = comb / (comb.sum(-2, keepdim=True) + weights.eps)
    for _ in range(weights.iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + weights.eps)
        comb = comb / (comb.sum(-2, keepdim=True) + weights.eps)
    return comb


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    kept = torch.bmm(comb.transpose(1, 2), streams.float())
    return torch.addcmul(kept, post[..., None], y.float()[:, None]).to(streams.dtype)


def collapse_head(streams: Tensor, weights: MixWeights) -> Tensor:
    wide = streams.float()
    pre = torch.sigmoid(_project(wide, weights) * weights.scale + weights.base) + weights.eps
    return _mix(wide, pre).to(streams.dtype)


def _project(wide: Tensor, weights: MixWeights) -> Tensor:
    flat = wide.flatten(1)
    return F.linear(F.rms_norm(flat, flat.shape[1:], None, weights.norm_eps), weights.fn)


def _mix(wide: Tensor, pre: Tensor) -> Tensor:
    return (pre[..., None] * wide).sum(1)
