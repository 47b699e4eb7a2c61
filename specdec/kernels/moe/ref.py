"""Routed experts in plain torch: one product per expert that anybody chose."""

import torch
import torch.nn.functional as F
from torch import Tensor


def route_top_k(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    probabilities = logits.float().softmax(-1)
    weights, experts = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :k], experts[:, :k]
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


def expert_mlps(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    terms = x.new_empty(*experts.shape, x.shape[-1])
    for expert in experts.unique().tolist():
        rows, choices = torch.where(experts == expert)
        gate, up = F.linear(x[rows], gate_up[expert]).chunk(2, -1)
        terms[rows, choices] = F.linear(F.silu(gate) * up, down[expert])
    return (terms.float() * weights[..., None]).sum(1).to(x.dtype)
