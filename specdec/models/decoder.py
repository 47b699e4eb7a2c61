"""The Qwen3 decoder layer, shared by targets and drafts: everything but the attention itself and its cache.

A caller runs `project`, attends as it must (paged rows, or a block over [pages | block]), then `finish`; what travels
between layers is the residual stream alone.
"""

import torch
from torch import Tensor

from specdec.kernels.linear import linear, norm_linear, norm_swiglu
from specdec.kernels.rotary import Rotary, head_norm_rotary
from specdec.layers.linear import ColumnLinear, Part, RowLinear
from specdec.layers.moe import ExpertMlps
from specdec.layers.norm import RmsNorm
from specdec.layers.parallel import ParallelGroup
from specdec.layers.weights import Destination
from specdec.models.configs import DecoderConfig, MoeConfig


class Mlp:
    """residual + down(silu(gate y) * up y), y = norm(residual)."""

    def __init__(self, config: DecoderConfig, group: ParallelGroup, dtype: torch.dtype, device: torch.device) -> None:
        part = Part.of(config.intermediate_size, group)
        self.gate_up = ColumnLinear(config.hidden_size, (part, part), False, dtype, device)
        self.down = RowLinear(part, config.hidden_size, False, group, dtype, device)

    def __call__(self, residual: Tensor, norm: RmsNorm) -> Tensor:
        return self.down(norm_swiglu(residual, norm.weight, norm.eps, self.gate_up.weight), residual)

    def weights(self, name: str) -> dict[str, Destination]:
        return self.gate_up.weights(f'{name}.gate_proj', f'{name}.up_proj') | self.down.weights(f'{name}.down_proj')


class DecoderLayer:
    """One layer of a DecoderConfig stack; `moe` replaces its MLP.

    `head_norms` [q + kv, hd] holds Qwen3's one norm weight for all query heads and one for all key heads, stacked, so
    that both are normed together.
    """

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

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads // self.num_kv_heads

    def project(self, residual: Tensor) -> Tensor:
        """Residual stream [T, H] -> query, key and value heads side by side [T, (q + 2 kv) * hd]."""
        return norm_linear(residual, self.input_norm.weight, self.eps, self.qkv.weight, self.qkv.bias)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Attention output [T, q * hd] and MLP into the residual stream -> [T, H]."""
        return self.mlp(self.output(attended, residual), self.post_norm)

    def context(self, fused: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values [T, kv, hd] of a draft's context rows [T, H]; no query, no input norm."""
        first = self.num_heads * self.head_dim
        bias = None if self.qkv.bias is None else self.qkv.bias[first:]
        heads = linear(fused, self.qkv.weight[first:], bias).view(fused.shape[0], -1, self.head_dim)
        keys, norms = heads[:, : self.num_kv_heads], self.head_norms[self.num_heads :]
        return head_norm_rotary(keys, norms, self.eps, rotary), heads[:, self.num_kv_heads :]

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
