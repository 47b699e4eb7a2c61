"""Gated attention: every query head has a gate for its output, and only a part of a head is rotated."""

import torch
from torch import Tensor

from specdec.kernels.gates import sigmoid_gate
from specdec.kernels.linear import linear_add, norm_linear
from specdec.kernels.paged_attention import paged_attention
from specdec.kernels.rotary import Rotary
from specdec.layers.norm import RmsNorm
from specdec.layers.rotary import rotary_order
from specdec.layers.weights import Destination, Place, Rearranged
from specdec.models.configs import DecoderConfig


class GatedAttention:
    """Queries and keys are kept with their channels in `rotary_order`; memory holds (q, k, v, gates) by rows.

    A checkpoint's q_proj holds each head's query and then its gate. The norms' 1 + w are fp32.
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.size, self.eps, self.scale = config.hidden_size, config.rms_norm_eps, config.head_dim**-0.5
        self.order = rotary_order(config.rope, config.head_dim)
        self.queries, self.keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        rows = 2 * self.queries + 2 * self.keys
        self.input = torch.empty(rows, self.size, dtype=dtype, device=device)
        self.output = torch.empty(self.size, self.queries, dtype=dtype, device=device)
        biased = config.attention_bias
        self.input_bias = torch.empty(rows, dtype=dtype, device=device) if biased else None
        self.output_bias = torch.empty(self.size, dtype=dtype, device=device) if biased else None
        self.head_norms = torch.empty(
            self.num_heads + self.num_kv_heads, self.head_dim, dtype=torch.float32, device=device
        )

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def __call__(
        self, residual: Tensor, norm: RmsNorm, rotary: Rotary, k: Tensor, v: Tensor, slots: Tensor, plan: object
    ) -> Tensor:
        """residual [T, H] -> [T, H] with the attention's share of norm(residual); k, v: the layer's pages."""
        rows = norm_linear(residual, norm.weight, norm.eps, self.input, self.input_bias)
        qkv, gate = rows.split((self.queries + 2 * self.keys, self.queries), 1)
        attended = paged_attention(qkv, self.head_norms, self.eps, rotary, k, v, slots, plan, None, self.scale)
        return linear_add(sigmoid_gate(attended, gate), self.output, self.output_bias, residual)

    def weights(self, name: str) -> dict[str, Place]:
        found: dict[str, Place] = {
            f'{name}.o_proj.weight': Destination(self.output, tuple(self.output.shape)),
            f'{name}.q_norm.weight': Rearranged((self.head_dim,), self._norm(slice(None, self.num_heads))),
            f'{name}.k_norm.weight': Rearranged((self.head_dim,), self._norm(slice(self.num_heads, None))),
        }
        if self.output_bias is not None:
            found[f'{name}.o_proj.bias'] = Destination(self.output_bias, tuple(self.output_bias.shape))
        for kind, memory in (('weight', self.input), ('bias', self.input_bias)):
            if memory is not None:
                found |= self._input_weights(name, kind, memory)
        return found

    def _input_weights(self, name: str, kind: str, memory: Tensor) -> dict[str, Place]:
        rest = tuple(memory.shape[1:])
        q, k, v, gate = memory.split((self.queries, self.keys, self.keys, self.queries))

        def place_queries(tensor: Tensor) -> None:
            pairs = tensor.view(self.num_heads, 2, self.head_dim, *rest)
            q.view(self.num_heads, self.head_dim, *rest).copy_(pairs[:, 0, self.order])
            gate.view(self.num_heads, self.head_dim, *rest).copy_(pairs[:, 1])

        def place_keys(tensor: Tensor) -> None:
            heads = tensor.view(self.num_kv_heads, self.head_dim, *rest)
            k.view(self.num_kv_heads, self.head_dim, *rest).copy_(heads[:, self.order])

        return {
            f'{name}.q_proj.{kind}': Rearranged((2 * self.queries, *rest), place_queries),
            f'{name}.k_proj.{kind}': Rearranged((self.keys, *rest), place_keys),
            f'{name}.v_proj.{kind}': Destination(v, (self.keys, *rest)),
        }

    def _norm(self, heads: slice):
        def place(tensor: Tensor) -> None:
            self.head_norms[heads].copy_((tensor.float() + 1)[self.order].expand_as(self.head_norms[heads]))

        return place
