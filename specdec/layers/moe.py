"""A routed mixture of SwiGLU experts in place of an MLP."""

import torch
from torch import Tensor

from specdec.kernels.gates import sigmoid_gate
from specdec.kernels.linear import linear, norm_swiglu
from specdec.kernels.moe import expert_mlps, route_top_k
from specdec.layers.linear import ColumnLinear, Part
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

    def weights(self, name: str, stacked: bool = False) -> dict[str, Destination]:
        """`stacked`: the checkpoint holds all experts in two tensors."""
        part, inner = self.part, self.part.count
        found = {f'{name}.gate.weight': Destination(self.router, (self.num_experts, self.size))}
        if stacked:
            assert inner == part.total, 'stacked experts are not sharded'
            for part_name, view in (('gate_up_proj', self.gate_up), ('down_proj', self.down)):
                found[f'{name}.experts.{part_name}'] = Destination(view, tuple(view.shape))
            return found
        for e in range(self.num_experts):
            expert = f'{name}.experts.{e}'
            wide, tall = (part.total, self.size), (self.size, part.total)
            found[f'{expert}.gate_proj.weight'] = Destination(self.gate_up[e, :inner], wide, 0, part.start)
            found[f'{expert}.up_proj.weight'] = Destination(self.gate_up[e, inner:], wide, 0, part.start)
            found[f'{expert}.down_proj.weight'] = Destination(self.down[e], tall, 1, part.start)
        return found


class SharedExpert:
    """An expert that every token has, behind a gate of its own: sigmoid(w y) down(silu(gate y) * up y)."""

    def __init__(
        self, size: int, intermediate: int, group: ParallelGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.part, self.group, self.size = Part.of(intermediate, group), group, size
        self.gate_up = ColumnLinear(size, (self.part, self.part), False, dtype, device)
        self.down = torch.empty(size, self.part.count, dtype=dtype, device=device)
        self.gate = torch.empty(1, size, dtype=dtype, device=device)

    def add_to(self, total: Tensor, residual: Tensor, norm: RmsNorm) -> Tensor:
        """total [T, H] and the expert's share of y = norm(residual [T, H])."""
        inner = norm_swiglu(residual, norm.weight, norm.eps, self.gate_up.weight)
        shared = self.group.all_reduce(linear(inner, self.down))
        return sigmoid_gate(shared, linear(norm(residual), self.gate), total)

    def weights(self, name: str) -> dict[str, Destination]:
        expert, part = f'{name}.shared_expert', self.part
        return {
            **self.gate_up.weights(f'{expert}.gate_proj', f'{expert}.up_proj'),
            f'{expert}.down_proj.weight': Destination(self.down, (self.size, part.total), 1, part.start),
            f'{name}.shared_expert_gate.weight': Destination(self.gate, (1, self.size)),
        }
