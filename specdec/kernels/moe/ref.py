"""Routed experts in plain torch: one product per expert that anybody chose."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.moe import Matrices


def route_top_k(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    probabilities = logits.float().softmax(-1)
    weights, experts = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :k], experts[:, :k]
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


def route_sqrt_softplus(
    logits: Tensor, bias: Tensor | None, experts: Tensor | None, k: int, scale: float
) -> tuple[Tensor, Tensor]:
    scores = F.softplus(logits).sqrt()
    if experts is None:
        biased = scores if bias is None else scores + bias
        experts = biased.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale, experts


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def numbers(weight: Matrices, dtype: torch.dtype) -> Tensor:
    """What a weight stands for."""
    if isinstance(weight, Tensor):
        return weight
    table = torch.tensor(E2M1 + tuple(-value for value in E2M1), device=weight.values.device)
    nibbles = torch.stack([weight.values & 15, weight.values >> 4], -1).flatten(-2)
    scales = torch.exp2(weight.scales.float() - 127)
    return (table[nibbles.long()] * scales.repeat_interleave(32, -1)).to(dtype)


def expert_mlps(
    x: Tensor, gate_up: Matrices, down: Matrices, weights: Tensor, experts: Tensor, limit: float | None = None
) -> Tensor:
    terms = x.new_empty(*experts.shape, x.shape[-1])
    for expert in experts.unique().tolist():
        rows, choices = torch.where(experts == expert)
        gate, up = F.linear(x[rows], numbers(gate_up[expert], x.dtype)).chunk(2, -1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        terms[rows, choices] = F.linear(F.silu(gate) * up, numbers(down[expert], x.dtype))
    return (terms.float() * weights[..., None]).sum(1).to(x.dtype)
