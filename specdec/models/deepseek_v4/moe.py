"""Routed experts and a shared one, SwiGLU clamped; the first layers choose experts by token id."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.linear import linear
from specdec.kernels.moe import Fp4Weight, Matrices, expert_mlps, route_sqrt_softplus
from specdec.layers.weights import Destination
from specdec.models.deepseek_v4.config import DeepseekV4Config
from specdec.models.deepseek_v4.tensors import GROUP


def keeps_packed(device: torch.device) -> bool:
    """Whether four-bit experts stay packed: where reading weights is what a step waits for. A CPU's products have no
    use for them.
    """
    return device.type == 'cuda'


class Experts:
    """`table` [V, k]: experts of each token id in a layer `hashed`; else `bias` [E] takes part in choosing."""

    def __init__(self, config: DeepseekV4Config, hashed: bool, dtype: torch.dtype, device: torch.device) -> None:
        size, inner, experts = config.hidden_size, config.intermediate_size, config.num_experts
        self.inner, self.limit, self.scale, self.k = (
            inner,
            config.swiglu_limit,
            config.route_scale,
            config.experts_per_token,
        )
        self.router = torch.empty(experts, size, dtype=torch.float32, device=device)
        self.table = torch.empty(config.vocab_size, self.k, dtype=torch.int64, device=device) if hashed else None
        self.bias = None if hashed else torch.empty(experts, dtype=torch.float32, device=device)
        self.gate_up: Matrices
        self.down: Matrices
        if config.fp4_experts and keeps_packed(device):
            self.gate_up = _empty_fp4(experts, 2 * inner, size, device)
            self.down = _empty_fp4(experts, size, inner, device)
        else:
            self.gate_up = torch.empty(experts, 2 * inner, size, dtype=dtype, device=device)
            self.down = torch.empty(experts, size, inner, dtype=dtype, device=device)
        self.shared_gate_up = torch.empty(2 * inner, size, dtype=dtype, device=device)
        self.shared_down = torch.empty(size, inner, dtype=dtype, device=device)

    def __call__(self, x: Tensor, ids: Tensor) -> Tensor:
        """x [T, D], token ids [T] -> [T, D]."""
        logits = F.linear(x.float(), self.router)  # a near-tie decided by rounding would change the experts
        chosen = None if self.table is None else self.table[ids]
        weights, experts = route_sqrt_softplus(logits, self.bias, chosen, self.k, self.scale)
        routed = expert_mlps(x, self.gate_up, self.down, weights, experts, self.limit)
        gate, up = linear(x, self.shared_gate_up).chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return routed + linear(F.silu(gate) * up, self.shared_down)

    def weights(self, name: str) -> dict[str, Destination]:
        inner, size = self.inner, self.router.shape[1]
        wide, tall = (inner, size), (size, inner)
        found = {
            f'{name}.gate.weight': Destination(self.router, tuple(self.router.shape)),
            f'{name}.shared_experts.w1.weight': Destination(self.shared_gate_up[:inner], wide),
            f'{name}.shared_experts.w3.weight': Destination(self.shared_gate_up[inner:], wide),
            f'{name}.shared_experts.w2.weight': Destination(self.shared_down, tall),
        }
        if self.table is not None:
            found[f'{name}.gate.tid2eid'] = Destination(self.table, tuple(self.table.shape))
        if self.bias is not None:
            found[f'{name}.gate.bias'] = Destination(self.bias, tuple(self.bias.shape))
        for e in range(self.router.shape[0]):
            expert = f'{name}.experts.{e}'
            found |= _matrix(f'{expert}.w1', self.gate_up, e, slice(None, inner))
            found |= _matrix(f'{expert}.w3', self.gate_up, e, slice(inner, None))
            found |= _matrix(f'{expert}.w2', self.down, e, slice(None))
        return found


def _empty_fp4(experts: int, rows: int, columns: int, device: torch.device) -> Fp4Weight:
    values = torch.empty(experts, rows, columns // 2, dtype=torch.uint8, device=device)
    return Fp4Weight(values, torch.empty(experts, rows, columns // GROUP, dtype=torch.uint8, device=device))


def _matrix(name: str, stack: Matrices, expert: int, rows: slice) -> dict[str, Destination]:
    """Where the rows of one expert come from: a weight, or a weight and its scale."""
    parts = {'weight': stack} if isinstance(stack, Tensor) else {'weight': stack.values, 'scale': stack.scales}
    views = {f'{name}.{kind}': tensor[expert, rows] for kind, tensor in parts.items()}
    return {part: Destination(view, tuple(view.shape)) for part, view in views.items()}
