"""The DSpark heads bundled in a checkpoint: taps become a context ring, a block of g rows becomes g drafts.

Formulas: docs/deepseek_v4.md, section "Bundled draft". Embedding and head are the target's.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.hyper_connections import collapse_head
from specdec.kernels.linear import linear
from specdec.kernels.markov import ChainDraws, MarkovWeights, markov_chain
from specdec.kernels.ring import Sources, ring_places, ring_step, ring_write
from specdec.layers.embedding import Head, VocabEmbedding
from specdec.layers.weights import Destination
from specdec.models.deepseek_v4.block import Block
from specdec.models.deepseek_v4.caches import DraftRings, DraftRingSpec
from specdec.models.deepseek_v4.config import DeepseekV4Config
from specdec.models.deepseek_v4.hyper_connections import HyperConnection
from specdec.models.deepseek_v4.norm import WideNorm
from specdec.models.deepseek_v4.rotary import PairRotary, Rotation


class BundledDspark:
    """Stages `mtp.0` .. in sequence, each a window-only layer with learned routing, whatever its index."""

    def __init__(
        self,
        config: DeepseekV4Config,
        embedding: VocabEmbedding,
        head: Head,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        draft = config.draft
        assert draft is not None, 'a checkpoint without DSpark heads'
        size, rank = config.hidden_size, draft.markov_rank
        self.config, self.draft, self.dtype = config, draft, dtype
        self.embedding, self.head = embedding, head
        self.main_projection = torch.empty(size, len(draft.taps) * size, dtype=dtype, device=device)
        self.main_norm = WideNorm(size, config.rms_norm_eps, device)
        self.stages = [Block(config, 0, False, dtype, device) for _ in range(draft.num_stages)]
        self.head_mix = HyperConnection(config, device, head=True)
        self.norm = WideNorm(size, config.rms_norm_eps, device)
        w1, w2 = (torch.empty(config.vocab_size, rank, dtype=dtype, device=device) for _ in range(2))
        self.markov = MarkovWeights(w1, w2, 'vanilla')
        self.confidence = (
            torch.empty(1, size + rank, dtype=torch.float32, device=device) if draft.has_confidence else None
        )
        self.rotary = PairRotary(config.rope, config.rope_dim, device)

    def cache_spec(self) -> DraftRingSpec:
        return DraftRingSpec(self.config, self.draft, self.dtype)

    def weights(self) -> dict[str, Destination]:
        found: dict[str, Destination] = {}
        for s, stage in enumerate(self.stages):
            found |= stage.weights(f'mtp.{s}')
        last = f'mtp.{len(self.stages) - 1}'
        tensors = {
            'mtp.0.main_proj.weight': self.main_projection,
            f'{last}.markov_head.markov_w1.weight': self.markov.w1,
            f'{last}.markov_head.markov_w2.weight': self.markov.w2,
        }
        if self.confidence is not None:
            tensors[f'{last}.confidence_head.proj.weight'] = self.confidence
        found |= {name: Destination(t, tuple(t.shape)) for name, t in tensors.items()}
        found |= self.main_norm.weights('mtp.0.main_norm') | self.norm.weights(f'{last}.norm')
        return found | self.head_mix.weights(f'{last}.hc_head')

    def absorb(self, taps: Tensor, positions: Tensor, row_offsets: Tensor, slots: Tensor, rings: DraftRings) -> None:
        """Context of rows whose taps are known: taps [T, m * D], positions [T], row_offsets [B + 1], slots [B].

        Rows that turn out rejected may be among them: a ring is wide enough for a window and a block.
        """
        context = self.main_norm(linear(taps.to(self.dtype), self.main_projection))
        rotation = self.rotary.at(positions)
        starts = positions[row_offsets[:-1]]
        step = ring_step(row_offsets, starts, slots, positions)
        places = ring_places(step, rings.windows[0].capacity)
        for stage, ring in zip(self.stages, rings.windows):
            ring_write(ring.rows, stage.attention.latent.latents(context, rotation), places)

    def block(self, anchors: Tensor, lengths: Tensor, slots: Tensor, rings: DraftRings) -> Tensor:
        """The block [anchor, noise, ...] behind each request -> its rows [P, g, D] before the final norm.

        anchors [P] ids at positions lengths [P]; slots [P]. Every row sees the window's worth of context before the
        anchor and the whole block; nothing is written.
        """
        rows = self.draft.block_rows
        ids = anchors.new_full((anchors.shape[0], rows), self.draft.noise_id)
        ids[:, 0] = anchors
        positions = (lengths[:, None] + torch.arange(rows, device=lengths.device)).flatten()
        rotation, window = self.rotary.at(positions), self._window(lengths, slots, rings)
        flat = ids.flatten()
        streams = self.embedding(flat).to(self.dtype)[:, None].expand(-1, self.config.streams, -1)
        for stage, ring in zip(self.stages, rings.windows):
            attend = partial(_attend_block, stage, rotation=rotation, ring=ring.rows, window=window)
            streams = stage(streams, flat, attend)
        return collapse_head(streams, self.head_mix.mix).view(*ids.shape, -1)

    def _window(self, lengths: Tensor, slots: Tensor, rings: DraftRings) -> Sources:
        """The W positions before each anchor from the ring, then the block's own rows; alike for all its rows."""
        width, rows, capacity = self.config.window, self.draft.block_rows, rings.windows[0].capacity
        device, count = lengths.device, lengths.shape[0]
        context = lengths[:, None] + torch.arange(-width, 0, device=device)
        places = slots[:, None] * capacity + context.clamp(min=0) % capacity
        block = torch.arange(count * rows, device=device).view(count, rows)
        own = torch.ones_like(block, dtype=torch.bool)
        sources = (
            torch.cat([torch.zeros_like(places), block], 1),
            torch.cat([places, torch.zeros_like(block)], 1),
            torch.cat([torch.ones_like(places, dtype=torch.bool), ~own], 1),
            torch.cat([context >= 0, own], 1),
        )
        return Sources(*(part.repeat_interleave(rows, 0) for part in sources))

    def logits(self, hidden: Tensor) -> Tensor:
        """Base logits of the block's rows [..., D] -> [..., V] fp32."""
        return self.head(self.norm(hidden).to(self.head.weight.dtype))

    def chain(
        self, logits: Tensor, hidden: Tensor, anchors: Tensor, draws: ChainDraws | None = None
    ) -> tuple[Tensor, Tensor]:
        """Drafts 1..K from base logits [P, K, V] of the block's first K rows -> tokens, and the token before each."""
        return markov_chain(logits, hidden, None, anchors, self.markov, draws=draws)

    def acceptance(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """The chance that draft k is accepted if those before are [P, K] fp32, None without a confidence head.

        It reads the rows before the final norm and the Markov embedding of the token before.
        """
        if self.confidence is None:
            return None
        features = torch.cat([hidden, F.embedding(previous, self.markov.w1).to(hidden.dtype)], -1)
        return F.linear(features.float(), self.confidence).squeeze(-1).sigmoid()


def _attend_block(stage: Block, x: Tensor, rotation: Rotation, ring: Tensor, window: Sources) -> Tensor:
    latent = stage.attention.latent
    return latent.attend(latent.query_rows(x), latent.latents(x, rotation), rotation, ring, window, None)
