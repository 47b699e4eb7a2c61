"""Scores and choice in plain torch, some rows at a time so that the gathered keys stay small."""

import torch
from torch import Tensor

GATHERED = 1 << 24  # numbers


def choose_entries(
    queries: Tensor, weights: Tensor, pages: Tensor, entries: Tensor, visible: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    keys = pages.flatten(0, 1)
    height = max(1, GATHERED // (entries.shape[1] * keys.shape[1]))
    chosen = [_choose(*part, keys, k) for part in zip(*(t.split(height) for t in (queries, weights, entries, visible)))]
    return torch.cat([c[0] for c in chosen]), torch.cat([c[1] for c in chosen])


def _choose(
    queries: Tensor, weights: Tensor, entries: Tensor, visible: Tensor, keys: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    products = torch.bmm(keys[entries].float(), queries.float().transpose(1, 2)).relu()  # [T, E, h]
    scores = torch.bmm(products, weights[..., None]).squeeze(-1).masked_fill(~visible, float('-inf'))
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return entries.gather(1, best), visible.gather(1, best)
