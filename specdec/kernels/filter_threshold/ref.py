"""The threshold in plain torch: values in order, masses summed from the largest down."""

import torch
from torch import Tensor

from specdec.kernels.filter_threshold import MAX_TOP_K, divided


def filter_threshold(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, bound: int
) -> Tensor:
    scaled, vocabulary = divided(logits, temperature), logits.shape[1]
    is_bounded = 0 < bound <= min(MAX_TOP_K, vocabulary)
    ranked = scaled.topk(bound, -1).values if is_bounded else scaled.sort(-1, descending=True).values
    last = torch.where(top_k > 0, top_k, vocabulary).clamp(max=ranked.shape[1]) - 1
    kth = ranked.gather(1, last[:, None])
    weights = (ranked - ranked[:, :1]).exp().masked_fill(ranked < kth, 0)
    mass = weights.cumsum(-1)
    total = mass[:, -1:]
    if is_bounded:  # values that equal the last kept one and were not ranked
        unranked = (scaled == kth).sum(-1, keepdim=True) - (ranked == kth).sum(-1, keepdim=True)
        total = total + unranked * (kth - ranked[:, :1]).exp()
    inside = mass - weights < top_p[:, None] * total
    kept = (inside | (top_p >= 1)[:, None]) & (ranked >= kth)  # a sum's last bits must not cut a long tail
    kept[:, 0] = True
    threshold = ranked.gather(1, kept.sum(-1, keepdim=True) - 1)
    threshold = threshold.maximum(ranked[:, :1] + min_p.log()[:, None]).squeeze(1)
    return torch.where(top_k > 0, threshold, float('-inf')) if is_bounded else threshold
