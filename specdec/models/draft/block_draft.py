"""The block draft of DFlash and DSpark: fuse taps, absorb context, run the block, turn rows into logits.

Formulas: docs/drafts.md. Context keys and values live in the target's pages as extra layers (`cache_spec`); the block's
own never enter a cache. Next: models/draft/heads.py for DSpark's sequential and confidence heads.
"""

import torch
from torch import Tensor

from specdec.kernels.block_attention import block_attention, plan_block_attention
from specdec.kernels.kv_cache import kv_write
from specdec.kernels.linear import linear
from specdec.kernels.rotary import rotary_rows
from specdec.layers.cache_specs import PagedCache, PagedSpec
from specdec.layers.embedding import Head, Table, VocabEmbedding
from specdec.layers.norm import RmsNorm
from specdec.layers.parallel import ParallelGroup
from specdec.layers.rotary import rotary_table
from specdec.layers.weights import Destination
from specdec.models.configs import DraftConfig
from specdec.models.decoder import DecoderLayer
from specdec.models.draft.heads import ConfidenceHead, MarkovHead
from specdec.models.draft.shared import OwnHead, OwnTable
from specdec.models.weights import Decision


class BlockDraft:
    """A draft in any dialect. `embedding` and `head` are the target's; own copies in the file replace them where they
    differ. `positions`: size of the rotary table, session_len + max(2 (K + 1), b).
    """

    def __init__(
        self,
        config: DraftConfig,
        embedding: VocabEmbedding | Table,
        head: Head,
        positions: int,
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        decoder = config.decoder
        self.config, self.dtype = config, dtype
        size = decoder.hidden_size
        self.fusion = torch.empty(size, len(config.taps) * config.target_hidden_size, dtype=dtype, device=device)
        self.context_norm = RmsNorm(size, decoder.rms_norm_eps, dtype, device)
        self.layers = [DecoderLayer(decoder, group, dtype, device) for _ in range(decoder.num_layers)]
        self.norm = RmsNorm(size, decoder.rms_norm_eps, dtype, device)
        self.embedding = OwnTable(embedding, decoder.vocab_size, size, dtype, device)
        self.head = OwnHead(head, config.draft_vocab_size, size, config.reduced_vocabulary, dtype, device)
        self.mask_embedding = torch.empty(size, dtype=dtype, device=device) if config.mask_embedding else None
        self.offsets = (
            torch.zeros(config.draft_vocab_size, dtype=torch.int64, device=device)
            if config.reduced_vocabulary
            else None
        )
        self.markov = MarkovHead(config, self.offsets, dtype, device) if config.markov else None
        with_markov = config.confidence_with_markov
        self.confidence = None if with_markov is None else ConfidenceHead(config, with_markov, device)
        self.rotary = rotary_table(decoder.rope, decoder.head_dim, positions, device)
        self.rules = tuple((rule.causal, rule.window, rule.anchored) for rule in config.rules)

    def cache_spec(self) -> PagedSpec:
        layer = self.layers[0]
        return PagedSpec('draft', len(self.layers), layer.num_kv_heads, layer.head_dim, self.dtype)

    def weights(self) -> dict[str, Destination | Decision]:
        config = self.config
        found: dict[str, Destination | Decision] = {
            'fc.weight': Destination(self.fusion, tuple(self.fusion.shape)),
            **self.context_norm.weights('hidden_norm'),
            **self.norm.weights('norm'),
        }
        for i, layer in enumerate(self.layers):
            found |= layer.weights(f'layers.{i}')
        if config.own_embedding:
            found |= self.embedding.weights('embed_tokens')
        if config.own_head:
            found |= self.head.weights('lm_head')
        if self.mask_embedding is not None:
            found['mask_embedding.weight'] = Destination(self.mask_embedding[None], (1, config.decoder.hidden_size))
        if self.offsets is not None:
            found['d2t'] = Destination(self.offsets, tuple(self.offsets.shape))
        if self.markov is not None:
            found |= self.markov.weights('markov_head')
        if self.confidence is not None:
            found |= self.confidence.weights('confidence_head')
        return found

    def absorb(self, taps: Tensor, positions: Tensor, slots: Tensor, cache: PagedCache) -> None:
        """Context of rows whose target taps are known: taps [T, m * Ht], positions [T], cache entries [T].

        One fused row feeds every layer, without that layer's input norm; keys are normed and rotated, values are not.
        """
        context = self.context_norm(linear(taps.to(self.dtype), self.fusion))
        rotary = rotary_rows(self.rotary, positions)
        for i, layer in enumerate(self.layers):
            k, v = layer.context(context, rotary)
            kv_write(k, v, cache.k[i], cache.v[i], slots)

    def block(self, anchors: Tensor, lengths: Tensor, page_table: Tensor, page_size: int, cache: PagedCache) -> Tensor:
        """The query block [anchor, MASK, ...] at positions length .. length + b - 1 -> final-normed rows [B, b, H].

        anchors [B] ids, lengths [B] committed tokens, page_table [B, P].
        """
        batch, rows = anchors.shape[0], self.config.block_rows
        positions = lengths[:, None] + torch.arange(rows, device=lengths.device)
        rotary = rotary_rows(self.rotary, positions.flatten())
        group, rules = self.layers[0].heads_per_group, frozenset(self.rules)
        plan = plan_block_attention(lengths, page_table, page_size, rows, group, rules, self.dtype)
        stream = self._inputs(anchors).flatten(0, 1)
        for i, layer in enumerate(self.layers):
            k, v = cache.k[i], cache.v[i]
            qkv, norms = layer.project(stream), layer.head_norms
            attended = block_attention(qkv, norms, layer.eps, rotary, k, v, plan, self.rules[i], layer.scale)
            stream = layer.finish(attended, stream)
        return self.norm(stream).view(batch, rows, -1)

    def _inputs(self, anchors: Tensor) -> Tensor:
        """Embeddings of the query block [B, b, H]; an override replaces mask slots, never an anchor that is MASK."""
        ids = anchors.new_full((anchors.shape[0], self.config.block_rows), self.config.mask_id)
        ids[:, 0] = anchors
        rows = self.embedding(ids).to(self.dtype)
        if self.mask_embedding is not None:
            rows[:, 1:] = self.mask_embedding
        return rows if self.config.input_scale == 1 else rows * self.config.input_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Base logits of rows [..., H] -> [..., Vd] fp32: head, then multiplier, then softcap."""
        config = self.config
        logits = self.head(hidden)
        if config.output_multiplier != 1:
            logits = logits * config.output_multiplier
        return logits if config.softcap is None else torch.tanh(logits / config.softcap) * config.softcap

    @property
    def column_ids(self) -> Tensor | None:
        """Target ids of the logits' columns [Vd], None where they are the columns."""
        return (
            None if self.offsets is None else torch.arange(len(self.offsets), device=self.offsets.device) + self.offsets
        )

    def target_ids(self, tokens: Tensor) -> Tensor:
        """Draft ids -> target ids."""
        return tokens if self.offsets is None else tokens + self.offsets[tokens]
