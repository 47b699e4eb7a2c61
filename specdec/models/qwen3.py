"""Qwen3 targets, dense and with experts (Qwen3ForCausalLM, Qwen3MoeForCausalLM).

The forward reads top-down: per layer project, attend over the pages, finish. Next: spec_decode/logits.py,
which the head's output goes to.
"""

import torch

from specdec.kernels.paged_attention import paged_attention, plan_paged_attention
from specdec.kernels.rotary import rotary_rows
from specdec.layers.cache_specs import PagedCache, PagedSpec
from specdec.layers.embedding import Head, VocabEmbedding
from specdec.layers.norm import RmsNorm
from specdec.layers.parallel import ParallelGroup
from specdec.layers.rotary import rotary_table
from specdec.layers.weights import Destination
from specdec.models.configs import Qwen3Config
from specdec.models.decoder import DecoderLayer
from specdec.models.target import Rows, TargetOutput


class Qwen3Target:
    """`taps`: layers whose residual stream is an output, -1 the embedding, ascending.

    `positions`: size of the rotary table.
    """

    def __init__(
        self,
        config: Qwen3Config,
        taps: tuple[int, ...],
        positions: int,
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        decoder = config.decoder
        self.vocab_size, self.hidden_size, self.num_layers = decoder.vocab_size, decoder.hidden_size, decoder.num_layers
        self.config, self.taps, self.dtype = config, frozenset(taps), dtype
        self.embedding = VocabEmbedding(decoder.vocab_size, decoder.hidden_size, group, dtype, device)
        moe = config.moe
        self.layers = [
            DecoderLayer(decoder, group, dtype, device, moe if moe and moe.sparse_layers[i] else None)
            for i in range(decoder.num_layers)
        ]
        self.norm = RmsNorm(decoder.hidden_size, decoder.rms_norm_eps, dtype, device)
        self.head_table = (
            None
            if config.tie_embeddings
            else VocabEmbedding(decoder.vocab_size, decoder.hidden_size, group, dtype, device)
        )
        self.head = Head(self.head_table or self.embedding)
        self.rotary = rotary_table(decoder.rope, decoder.head_dim, positions, device)

    def cache_spec(self, _num_drafts: int = 0) -> PagedSpec:
        layer = self.layers[0]
        return PagedSpec('target', self.num_layers, layer.num_kv_heads, layer.head_dim, self.dtype)

    def weights(self) -> dict[str, Destination]:
        found = self.embedding.weights('model.embed_tokens') | self.norm.weights('model.norm')
        for i, layer in enumerate(self.layers):
            found |= layer.weights(f'model.layers.{i}')
        if self.head_table is not None:
            found |= self.head_table.weights('lm_head')
        return found

    def forward(self, rows: Rows, cache: PagedCache) -> TargetOutput:
        """Run the rows, write their keys and values, and return every row's hidden state and taps."""
        windows, first = self.config.windows, self.layers[0]
        plan = plan_paged_attention(rows.layout, first.heads_per_group, frozenset(windows), self.dtype)
        rotary = rotary_rows(self.rotary, rows.positions)
        stream = self.embedding(rows.ids)
        taps = [stream] if -1 in self.taps else []
        for i, layer in enumerate(self.layers):
            k, v = cache.k[i], cache.v[i]
            qkv, norms = layer.project(stream), layer.head_norms
            attended = paged_attention(qkv, norms, layer.eps, rotary, k, v, rows.slots, plan, windows[i], layer.scale)
            stream = layer.finish(attended, stream)
            if i in self.taps:
                taps.append(stream)
        return TargetOutput(self.norm(stream), torch.cat(taps, -1) if taps else None)
