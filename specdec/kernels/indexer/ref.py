"""Scores and choice in plain torch, some rows at a time so that the gathered keys stay small."""

import torch
from torch import Tensor

from specdec.kernels.compressor import Entries

GATHERED = 1 << 24  # numbers


def choose_entries(queries: Tensor, weights: Tensor, pages: Tensor, entries: Entries, k: int) -> Entries:
    return best(scores(queries, weights, pages, entries), entries, k)


def scores(queries: Tensor, weights: Tensor, pages: Tensor, entries: Entries) -> Tensor:
    """[T, E] fp32, -inf where a row sees nothing."""
    keys = pages.flatten(0, 1)
    width = entries.flat.shape[1]
    height = max(1, GATHERED // (width * keys.shape[1]))
    parts = [
        _products(q, w, keys[entries.flat[rows]])
        for q, w, rows in zip(queries.split(height), weights.split(height), entries.rows.split(height))
    ]
    hidden = torch.arange(width, device=keys.device) >= entries.counts[:, None]
    return torch.cat(parts).masked_fill(hidden, float('-inf'))


def _products(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """queries [T, h, w], weights [T, h], keys [T, E, w] -> [T, E]."""
    products = torch.bmm(keys.float(), queries.float().transpose(1, 2)).relu()
    return torch.bmm(products, weights[..., None]).squeeze(-1)


def best(found: Tensor, entries: Entries, k: int) -> Entries:
    """The k largest of scores [T, E] in order; hidden entries come last."""
    order = found.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = entries.flat[entries.rows[:, None], order]
    return Entries(chosen, torch.arange(len(chosen), device=chosen.device), entries.counts.clamp(max=k))
