"""One layer: attention and experts, each between the streams' collapse and expansion. Targets and drafts share it."""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.kernels.hyper_connections import collapse, expand
from specdec.layers.weights import Destination
from specdec.models.deepseek_v4.attention import CompressedAttention
from specdec.models.deepseek_v4.config import DeepseekV4Config
from specdec.models.deepseek_v4.hyper_connections import HyperConnection
from specdec.models.deepseek_v4.moe import Experts
from specdec.models.deepseek_v4.norm import WideNorm

Attend = Callable[[Tensor], Tensor]


class Block:
    """`ratio` 0, 4 or 128; `hashed`: experts are chosen by token id."""

    def __init__(
        self, config: DeepseekV4Config, ratio: int, hashed: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.attention_mix = HyperConnection(config, device)
        self.attention_norm = WideNorm(config.hidden_size, config.rms_norm_eps, device)
        self.attention = CompressedAttention(config, ratio, dtype, device)
        self.experts_mix = HyperConnection(config, device)
        self.experts_norm = WideNorm(config.hidden_size, config.rms_norm_eps, device)
        self.experts = Experts(config, hashed, dtype, device)

    def __call__(self, streams: Tensor, ids: Tensor, attend: Attend) -> Tensor:
        """Streams [T, N, D] through both sublayers; `attend` is the attention over rows [T, D], the caller's."""
        x, post, comb = collapse(streams, self.attention_mix.mix)
        streams = expand(attend(self.attention_norm(x)), streams, post, comb)
        x, post, comb = collapse(streams, self.experts_mix.mix)
        return expand(self.experts(self.experts_norm(x), ids), streams, post, comb)

    def weights(self, name: str) -> dict[str, Destination]:
        return {
            **self.attention_mix.weights(f'{name}.hc_attn'),
            **self.attention_norm.weights(f'{name}.attn_norm'),
            **self.attention.weights(f'{name}.attn'),
            **self.experts_mix.weights(f'{name}.hc_ffn'),
            **self.experts_norm.weights(f'{name}.ffn_norm'),
            **self.experts.weights(f'{name}.ffn'),
        }
