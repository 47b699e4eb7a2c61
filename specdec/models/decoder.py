"""The Qwen3 decoder layer, shared by targets and drafts: everything but the attention itself and its cache.

A caller runs `project`, attends as it must (paged rows, or a block over [pages | block]), then `mix` and `mlp`. The
residual stream travels beside the normed input, so that each addition fuses with the norm behind it.
"""

import torch
from torch import Tensor

from specdec.kernels.activation import silu_mul
from specdec.kernels.linear import linear
from specdec.kernels.rotary import head_norm_rotary
from specdec.layers.linear import ColumnLinear, Part, RowLinear
from specdec.layers.moe import ExpertMlps
from specdec.layers.norm import RmsNorm
from specdec.layers.parallel import ParallelGroup
from specdec.layers.weights import Destination
from specdec.models.configs import DecoderConfig, MoeConfig

Rotary = tuple[Tensor, Tensor]


class Mlp:
    """down(silu(gate x) * up x)."""

    def __init__(self, config: DecoderConfig, group: ParallelGroup, dtype: torch.dtype, device: torch.device) -> None:
        part = Part.of(config.intermediate_size, group)
        self.gate_up = ColumnLinear(config.hidden_size, (part, part), False, dtype, device)
        self.down = RowLinear(part, config.hidden_size, False, group, dtype, device)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate_up(x)))

    def weights(self, name: str) -> dict[str, Destination]:
        return self.gate_up.weights(f'{name}.gate_proj', f'{name}.up_proj') | self.down.weights(f'{name}.down_proj')


class DecoderLayer:
    """One layer of a DecoderConfig stack; `moe` replaces its MLP."""

    def __init__(
        self,
        config: DecoderConfig,
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
        moe: MoeConfig | None = None,
    ) -> None:
        size, head_dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        query = Part.of(config.num_heads * head_dim, group, head_dim)
        key = Part.of(config.num_kv_heads * head_dim, group, head_dim)
        self.head_dim, self.num_heads, self.num_kv_heads = head_dim, query.count // head_dim, key.count // head_dim
        self.scale, self.eps = head_dim**-0.5, eps
        self.input_norm = RmsNorm(size, eps, dtype, device)
        self.qkv = ColumnLinear(size, (query, key, key), config.attention_bias, dtype, device)
        # one norm weight for all query heads and one for all key heads, stacked so that q and k are normed together
        self.head_norms = torch.empty(self.num_heads + self.num_kv_heads, head_dim, dtype=dtype, device=device)
        self.output = RowLinear(query, size, config.attention_bias, group, dtype, device)
        self.post_norm = RmsNorm(size, eps, dtype, device)
        self.mlp: Mlp | ExpertMlps
        if moe is None:
            self.mlp = Mlp(config, group, dtype, device)
        else:
            self.mlp = ExpertMlps(
                size, moe.num_experts, moe.experts_per_token, moe.intermediate_size, moe.norm_topk, group, dtype, device
            )

    def project(self, normed: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """normed [T, H] -> q [T, heads, hd], k and v [T, kv_heads, hd]; q and k normed per head and rotated."""
        heads = self.qkv(normed).view(normed.shape[0], -1, self.head_dim)
        turned = self.num_heads + self.num_kv_heads
        qk = head_norm_rotary(heads[:, :turned], self.head_norms, self.eps, rotary)
        return qk[:, : self.num_heads], qk[:, self.num_heads :], heads[:, turned:]

    def context(self, fused: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values of a draft's fused context rows [T, H]; no query, no input norm."""
        first = self.num_heads * self.head_dim
        bias = None if self.qkv.bias is None else self.qkv.bias[first:]
        heads = linear(fused, self.qkv.weight[first:], bias).view(fused.shape[0], -1, self.head_dim)
        keys, norms = heads[:, : self.num_kv_heads], self.head_norms[self.num_heads :]
        return head_norm_rotary(keys, norms, self.eps, rotary), heads[:, self.num_kv_heads :]

    def mix(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Attention output [T, heads, hd] into the stream -> (input of the MLP, residual)."""
        return self.post_norm.add(self.output(attended.flatten(1)), residual)

    def weights(self, name: str) -> dict[str, Destination]:
        attention, norms = f'{name}.self_attn', self.head_norms
        return (
            self.input_norm.weights(f'{name}.input_layernorm')
            | self.qkv.weights(f'{attention}.q_proj', f'{attention}.k_proj', f'{attention}.v_proj')
            | {
                f'{attention}.q_norm.weight': Destination(norms[: self.num_heads], (self.head_dim,)),
                f'{attention}.k_norm.weight': Destination(norms[self.num_heads :], (self.head_dim,)),
            }
            | self.output.weights(f'{attention}.o_proj')
            | self.post_norm.weights(f'{name}.post_attention_layernorm')
            | self.mlp.weights(f'{name}.mlp')
        )
