"""A routed mixture of SwiGLU experts in place of an MLP."""

import torch
from torch import Tensor

from specdec.kernels.linear import linear
from specdec.kernels.moe import expert_mlps, route_top_k
from specdec.layers.linear import Part
from specdec.layers.norm import RmsNorm
from specdec.layers.parallel import ParallelGroup
from specdec.layers.weights import Destination


class ExpertMlps:
    """Softmax router, top-k experts. Every rank holds a slice of every expert's width and adds up the results."""

    def __init__(
        self,
        size: int,
        num_experts: int,
        experts_per_token: int,
        intermediate: int,
        norm_topk: bool,
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.size, self.num_experts, self.experts_per_token, self.norm_topk = (
            size,
            num_experts,
            experts_per_token,
            norm_topk,
        )
        self.part, self.group = Part.of(intermediate, group), group
        self.router = torch.empty(num_experts, size, dtype=dtype, device=device)
        self.gate_up = torch.empty(num_experts, 2 * self.part.count, size, dtype=dtype, device=device)
        self.down = torch.empty(num_experts, size, self.part.count, dtype=dtype, device=device)

    def __call__(self, residual: Tensor, norm: RmsNorm) -> Tensor:
        """residual [T, H] + the experts' share of norm(residual)."""
        x = norm(residual)
        weights, experts = route_top_k(linear(x, self.router), self.experts_per_token, self.norm_topk)
        return residual + self.group.all_reduce(expert_mlps(x, self.gate_up, self.down, weights, experts))

    def weights(self, name: str) -> dict[str, Destination]:
        part, inner = self.part, self.part.count
        found = {f'{name}.gate.weight': Destination(self.router, (self.num_experts, self.size))}
        for e in range(self.num_experts):
            expert = f'{name}.experts.{e}'
            wide, tall = (part.total, self.size), (self.size, part.total)
            found[f'{expert}.gate_proj.weight'] = Destination(self.gate_up[e, :inner], wide, 0, part.start)
            found[f'{expert}.up_proj.weight'] = Destination(self.gate_up[e, inner:], wide, 0, part.start)
            found[f'{expert}.down_proj.weight'] = Destination(self.down[e], tall, 1, part.start)
        return found
