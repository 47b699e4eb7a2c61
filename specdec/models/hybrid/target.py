"""The hybrid target: layers of two kinds over one residual stream. Next: layers/recurrent.py, what one kind keeps."""

import torch
from torch import Tensor

from specdec.kernels.paged_attention import plan_paged_attention
from specdec.kernels.rotary import rotary_rows
from specdec.layers.cache_specs import PagedSpec
from specdec.layers.embedding import Head, VocabEmbedding
from specdec.layers.moe import ExpertMlps, SharedExpert
from specdec.layers.norm import CenteredNorm
from specdec.layers.parallel import SINGLE, ParallelGroup
from specdec.layers.recurrent import HybridCache, HybridSpec, RecurrentSpec
from specdec.layers.rotary import rotary_table
from specdec.layers.weights import Place
from specdec.models.configs import HybridConfig
from specdec.models.decoder import Mlp
from specdec.models.hybrid.attention import GatedAttention
from specdec.models.hybrid.delta import GatedDelta
from specdec.models.target import Rows, TargetOutput
from specdec.models.tensor_table import Shape


class HybridLayer:
    """The parts of one layer; `mixer` is of either kind, `shared` stands beside routed experts."""

    def __init__(
        self, config: HybridConfig, index: int, group: ParallelGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        decoder, moe = config.decoder, config.moe
        size, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.input_norm, self.post_norm = CenteredNorm(size, eps, device), CenteredNorm(size, eps, device)
        self.attention = GatedAttention(decoder, dtype, device) if config.attends[index] else None
        self.delta = None if config.attends[index] else GatedDelta(config, dtype, device)
        self.stacked = config.stacked_experts
        self.mlp: Mlp | ExpertMlps
        self.shared: SharedExpert | None = None
        if moe is None or not moe.sparse_layers[index]:
            self.mlp = Mlp(decoder, group, dtype, device)
            return
        self.mlp = ExpertMlps(
            size, moe.num_experts, moe.experts_per_token, moe.intermediate_size, moe.norm_topk, group, dtype, device
        )
        if moe.shared_size is not None:
            self.shared = SharedExpert(size, moe.shared_size, group, dtype, device)

    def finish(self, stream: Tensor) -> Tensor:
        """stream [T, H] and what MLP or experts make of it."""
        after = self.mlp(stream, self.post_norm)
        return after if self.shared is None else self.shared.add_to(after, stream, self.post_norm)

    def weights(self, name: str) -> dict[str, Place]:
        found = {
            **self.input_norm.weights(f'{name}.input_layernorm'),
            **self.post_norm.weights(f'{name}.post_attention_layernorm'),
        }
        if self.attention is not None:
            found |= self.attention.weights(f'{name}.self_attn')
        if self.delta is not None:
            found |= self.delta.weights(f'{name}.linear_attn')
        if self.shared is not None:
            found |= self.shared.weights(f'{name}.mlp')
        if isinstance(self.mlp, ExpertMlps):
            return found | self.mlp.weights(f'{name}.mlp', self.stacked)
        return found | self.mlp.weights(f'{name}.mlp')


class HybridTarget:
    """`taps`: layers whose residual stream is an output, -1 the embedding. `positions`: size of the rotary table."""

    def __init__(
        self,
        config: HybridConfig,
        taps: tuple[int, ...],
        positions: int,
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        decoder = config.decoder
        self.config, self.taps, self.dtype = config, frozenset(taps), dtype
        self.vocab_size, self.hidden_size, self.num_layers = decoder.vocab_size, decoder.hidden_size, decoder.num_layers
        self.embedding = VocabEmbedding(decoder.vocab_size, decoder.hidden_size, group, dtype, device)
        self.layers = [HybridLayer(config, i, group, dtype, device) for i in range(decoder.num_layers)]
        self.norm = CenteredNorm(decoder.hidden_size, decoder.rms_norm_eps, device)
        self.head_table = (
            None
            if config.tie_embeddings
            else VocabEmbedding(decoder.vocab_size, decoder.hidden_size, group, dtype, device)
        )
        self.head = Head(self.head_table or self.embedding)
        self.rotary = rotary_table(decoder.rope, decoder.head_dim, positions, device)

    def cache_spec(self, num_drafts: int = 0) -> HybridSpec:
        config, decoder = self.config, self.config.decoder
        attending = sum(config.attends)
        pages = PagedSpec('target', attending, decoder.num_kv_heads, decoder.head_dim, self.dtype)
        states = RecurrentSpec(self.num_layers - attending, config.heads, config.conv_width, num_drafts + 1, self.dtype)
        return HybridSpec(pages, states)

    def weights(self) -> dict[str, Place]:
        prefix = self.config.prefix
        found: dict[str, Place] = {
            **self.embedding.weights(f'{prefix}.embed_tokens'),
            **self.norm.weights(f'{prefix}.norm'),
        }
        for i, layer in enumerate(self.layers):
            found |= layer.weights(f'{prefix}.layers.{i}')
        if self.head_table is not None:
            found |= self.head_table.weights('lm_head')
        return found

    def forward(self, rows: Rows, cache: HybridCache) -> TargetOutput:
        """Run the rows, let them enter pages and states, and return every row's hidden state and taps."""
        decoder, pages = self.config.decoder, cache.pages
        states = cache.states.rows(rows.request_slots, rows.layout)
        per_group = decoder.num_heads // decoder.num_kv_heads
        plan = plan_paged_attention(rows.layout, per_group, frozenset({None}), self.dtype)
        rotary = rotary_rows(self.rotary, rows.positions)
        stream = self.embedding(rows.ids)
        taps = [stream] if -1 in self.taps else []
        attending, recurring = iter(zip(pages.k, pages.v)), iter(cache.states.layers)
        for i, layer in enumerate(self.layers):
            if layer.attention is not None:
                k, v = next(attending)
                stream = layer.attention(stream, layer.input_norm, rotary, k, v, rows.slots, plan)
            if layer.delta is not None:
                stream = layer.delta(stream, layer.input_norm, next(recurring), states)
            stream = layer.finish(stream)
            if i in self.taps:
                taps.append(stream)
        cache.states.advance(states, rows.layout)
        return TargetOutput(self.norm(stream), torch.cat(taps, -1) if taps else None)


def implied_shapes(config: HybridConfig) -> dict[str, Shape]:
    """The tensors that a checkpoint with this config must hold."""
    target = HybridTarget(config, (), 0, SINGLE, torch.bfloat16, torch.device('meta'))
    return {name: place.shape for name, place in target.weights().items()}
