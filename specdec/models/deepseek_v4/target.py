"""The DeepSeek-V4 target: rows in, hidden states and taps out. Next: draft.py, which reads the taps."""

from functools import partial

import torch

from specdec.kernels.hyper_connections import collapse_head
from specdec.layers.embedding import Head, VocabEmbedding
from specdec.layers.parallel import SINGLE, ParallelGroup
from specdec.layers.weights import Destination
from specdec.models.deepseek_v4.block import Block
from specdec.models.deepseek_v4.caches import DeepseekV4Caches, DeepseekV4CacheSpec
from specdec.models.deepseek_v4.config import DeepseekV4Config
from specdec.models.deepseek_v4.draft import BundledDspark
from specdec.models.deepseek_v4.hyper_connections import HyperConnection
from specdec.models.deepseek_v4.norm import WideNorm
from specdec.models.deepseek_v4.rotary import PairRotary
from specdec.models.deepseek_v4.rows import StepRows, plan_rows
from specdec.models.target import Rows, TargetOutput
from specdec.models.tensor_table import Shape


class DeepseekV4Target:
    """`taps`: layers whose streams' mean is an output, ascending, -1 the embedding.

    No table of angles needs to know how many positions there are: they are computed as needed.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        taps: tuple[int, ...],
        _positions: int,
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
        self.head = Head(self.head_table)
        self.rotaries = (
            PairRotary(config.rope, config.rope_dim, device),
            PairRotary(config.compress_rope, config.rope_dim, device),
        )

    def cache_spec(self, num_drafts: int = 0) -> DeepseekV4CacheSpec:
        """Rings with room for `num_drafts` rows that may turn out rejected."""
        return DeepseekV4CacheSpec(self.config, num_drafts, self.dtype)

    def weights(self) -> dict[str, Destination]:
        found = self.embedding.weights('embed') | self.head_table.weights('head')
        found |= self.norm.weights('norm') | self.head_mix.weights('hc_head')
        for i, block in enumerate(self.blocks):
            found |= block.weights(f'layers.{i}')
        return found

    def forward(self, rows: Rows, cache: DeepseekV4Caches) -> TargetOutput:
        """Run the rows, let them enter the caches, and return every row's hidden state and taps."""
        step = self._plan(rows, cache)
        embedded = self.embedding(rows.ids)
        taps = [embedded] if -1 in self.taps else []
        streams = embedded[:, None].expand(-1, self.config.streams, -1)
        for i, (block, layer) in enumerate(zip(self.blocks, cache.layers)):
            streams = block(streams, rows.ids, partial(block.attention, rows=step, cache=layer))
            if i in self.taps:
                taps.append(streams.mean(1))
        hidden = self.norm(collapse_head(streams, self.head_mix.mix))
        return TargetOutput(hidden, torch.cat(taps, -1) if taps else None)

    def _plan(self, rows: Rows, cache: DeepseekV4Caches) -> StepRows:
        partials = {
            ratio: layer.entries.ring.capacity
            for ratio, layer in zip(self.config.ratios, cache.layers)
            if layer.entries is not None
        }
        return plan_rows(rows, self.config.window, cache.layers[0].window.capacity, partials, self.rotaries)


def implied_shapes(config: DeepseekV4Config) -> dict[str, Shape]:
    """The tensors that a checkpoint with this config must hold, heads included, under the release's names."""
    meta = torch.device('meta')
    target = DeepseekV4Target(config, (), 0, SINGLE, torch.bfloat16, meta)
    shapes = {name: destination.shape for name, destination in target.weights().items()}
    if config.draft is not None:
        draft = BundledDspark(config, target.embedding, target.head, torch.bfloat16, meta)
        shapes |= {name: destination.shape for name, destination in draft.weights().items()}
    return shapes
