"""The DeepSeek-V4 target: rows in, hidden states and taps out. Next: draft.py, which reads the taps."""

from functools import partial

import torch
from torch import Tensor

from specdec.kernels.hyper_connections import collapse_head
from specdec.kernels.paged_attention import RowLayout
from specdec.layers.embedding import Head, VocabEmbedding
from specdec.layers.parallel import ParallelGroup
from specdec.layers.weights import Destination
from specdec.models.deepseek_v4.block import Block
from specdec.models.deepseek_v4.caches import DeepseekV4Caches, DeepseekV4CacheSpec
from specdec.models.deepseek_v4.config import DeepseekV4Config
from specdec.models.deepseek_v4.hyper_connections import HyperConnection
from specdec.models.deepseek_v4.norm import WideNorm
from specdec.models.deepseek_v4.rotary import PairRotary
from specdec.models.deepseek_v4.rows import StepRows, plan_rows
from specdec.models.target import TargetOutput


class DeepseekV4Target:
    """`taps`: layers whose streams' mean is an output, ascending."""

    def __init__(
        self,
        config: DeepseekV4Config,
        taps: tuple[int, ...],
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config, self.taps, self.dtype = config, frozenset(taps), dtype
        self.vocab_size, self.hidden_size, self.num_layers = config.vocab_size, config.hidden_size, config.num_layers
        self.embedding = VocabEmbedding(config.vocab_size, config.hidden_size, group, dtype, device)
        self.blocks = [
            Block(config, ratio, i < config.hash_layers, dtype, device) for i, ratio in enumerate(config.ratios)
        ]
        self.head_mix = HyperConnection(config, device, head=True)
        self.norm = WideNorm(config.hidden_size, config.rms_norm_eps, device)
        self.head_table = VocabEmbedding(config.vocab_size, config.hidden_size, group, dtype, device)
        self.head = Head(self.head_table.weight)
        self.rotaries = (
            PairRotary(config.rope, config.rope_dim, device),
            PairRotary(config.compress_rope, config.rope_dim, device),
        )

    def cache_spec(self, num_drafts: int) -> DeepseekV4CacheSpec:
        """Caches for at most `num_drafts` verified drafts a step."""
        return DeepseekV4CacheSpec(self.config, num_drafts, self.dtype)

    def weights(self) -> dict[str, Destination]:
        found = self.embedding.weights('embed') | self.head_table.weights('head')
        found |= self.norm.weights('norm') | self.head_mix.weights('hc_head')
        for i, block in enumerate(self.blocks):
            found |= block.weights(f'layers.{i}')
        return found

    def forward(
        self, ids: Tensor, positions: Tensor, slots: Tensor, layout: RowLayout, caches: DeepseekV4Caches
    ) -> TargetOutput:
        """Packed rows: ids, positions [T]; slots [B] of the layout's requests. Their rows enter the caches."""
        rows = self._plan(ids, positions, slots, layout, caches)
        streams = self.embedding(ids)[:, None].expand(-1, self.config.streams, -1)
        taps = []
        for i, (block, cache) in enumerate(zip(self.blocks, caches.layers)):
            streams = block(streams, ids, partial(block.attention, rows=rows, cache=cache))
            if i in self.taps:
                taps.append(streams.mean(1))
        hidden = self.norm(collapse_head(streams, self.head_mix.mix))
        return TargetOutput(hidden, torch.cat(taps, -1) if taps else None)

    def _plan(
        self, ids: Tensor, positions: Tensor, slots: Tensor, layout: RowLayout, caches: DeepseekV4Caches
    ) -> StepRows:
        partials = {
            ratio: cache.entries.ring.shape[1]
            for ratio, cache in zip(self.config.ratios, caches.layers)
            if cache.entries is not None
        }
        capacity = caches.layers[0].window.shape[1]
        return plan_rows(ids, positions, slots, layout, self.config.window, capacity, partials, self.rotaries)
