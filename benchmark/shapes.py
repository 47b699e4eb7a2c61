"""Public model shapes with random weights, made on the device that runs them, and the bytes their steps must move."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from specdec.kernels.gated_delta_rule import DeltaHeads
from specdec.layers.embedding import Head, VocabEmbedding
from specdec.layers.parallel import SINGLE
from specdec.layers.rotary import RopeConfig
from specdec.layers.weights import Place, Rearranged
from specdec.models.configs import (
    DecoderConfig,
    DraftConfig,
    HybridConfig,
    LayerRule,
    MarkovConfig,
    MoeConfig,
    Qwen3Config,
)
from specdec.models.draft.block_draft import BlockDraft
from specdec.models.hybrid.target import HybridTarget
from specdec.models.qwen3 import Qwen3Target
from specdec.models.weights import Decision

VOCABULARY = 151936
ANY_MEMORY = 2**50  # bytes: a benchmark says itself how many pages it wants
ROPE = RopeConfig(theta=1e6)


def _decoder(size: int, layers: int, heads: int, kv_heads: int, inner: int) -> DecoderConfig:
    return DecoderConfig(size, layers, heads, kv_heads, 128, inner, 1e-6, VOCABULARY, ROPE, 40960)


DENSE = {
    'qwen3-4b': (_decoder(2560, 36, 32, 8, 9728), True),
    'qwen3-8b': (_decoder(4096, 36, 32, 8, 12288), False),
    'qwen3-32b': (_decoder(5120, 64, 64, 8, 25600), False),
}
SPARSE = {'qwen3-30b-a3b': (_decoder(2048, 48, 32, 4, 6144), 128, 8, 768)}
HYBRID = {
    'qwen3.5-35b-a3b': HybridConfig(
        architecture='Qwen3_5MoeForCausalLM',
        decoder=DecoderConfig(2048, 40, 16, 2, 256, 6144, 1e-6, 248320, RopeConfig(theta=1e7, partial=0.25), 262144),
        attends=tuple((layer + 1) % 4 == 0 for layer in range(40)),
        heads=DeltaHeads(16, 32, 128, 128),
        conv_width=4,
        tie_embeddings=False,
        dtype='bfloat16',
        moe=MoeConfig(256, 8, 512, True, (True,) * 40, 512),
        stacked_experts=True,
    )
}
SHAPES = (*DENSE, *SPARSE, *HYBRID)


def target_config(shape: str) -> Qwen3Config | HybridConfig:
    if shape in HYBRID:
        return HYBRID[shape]
    if shape in DENSE:
        decoder, tied = DENSE[shape]
        return Qwen3Config('Qwen3ForCausalLM', decoder, (None,) * decoder.num_layers, tied, 'bfloat16')
    decoder, experts, chosen, inner = SPARSE[shape]
    moe = MoeConfig(experts, chosen, inner, True, (True,) * decoder.num_layers)
    return Qwen3Config('Qwen3MoeForCausalLM', decoder, (None,) * decoder.num_layers, False, 'bfloat16', moe)


def draft_config(target: Qwen3Config | HybridConfig, kind: str, block_rows: int) -> DraftConfig:
    """Five layers of the target's widths, five taps, as published drafts have. DSpark: rank 256, anchor-first.

    A hybrid's draft is plain all the same: 32 heads of 128, 4 key heads.
    """
    body = target.decoder
    heads, kv_heads = (32, 4) if isinstance(target, HybridConfig) else (body.num_heads, body.num_kv_heads)
    decoder = _decoder(body.hidden_size, 5, heads, kv_heads, body.intermediate_size)
    decoder = replace(decoder, vocab_size=body.vocab_size)
    spread = tuple(round(1 + i * (body.num_layers - 4) / 4) for i in range(5))
    sequential = kind == 'dspark'
    return DraftConfig(
        dialect='deepspec' if sequential else 'zlab',
        kind='dspark' if sequential else 'dflash',
        decoder=decoder,
        target_hidden_size=body.hidden_size,
        taps=spread,
        block_rows=block_rows,
        anchor_predicts=sequential,
        default_tokens=block_rows - (not sequential),
        mask_id=151669,
        rules=(LayerRule(),) * 5,
        markov=MarkovConfig('vanilla', 256) if sequential else None,
        confidence_with_markov=True if sequential else None,
        draft_vocab_size=body.vocab_size,
        own_embedding=False,
        own_head=False,
        dtype='bfloat16',
    )


def _fill(weights: Mapping[str, Place | Decision], device: torch.device) -> None:
    """Gaussian matrices whose products keep their size, norms of one."""
    generator = torch.Generator(device).manual_seed(0)
    for name, destination in weights.items():
        if isinstance(destination, Decision):
            continue
        if isinstance(destination, Rearranged):
            scale = 0.0 if 'norm' in name else destination.shape[-1] ** -0.5  # norms hold w of 1 + w
            destination.accept(torch.randn(destination.shape, generator=generator, device=device) * scale)
            continue
        if 'norm' in name:
            destination.view.fill_(1)
        elif destination.view.is_floating_point():
            destination.view.normal_(0, destination.shape[-1] ** -0.5, generator=generator)


def make_target(shape: str, taps: tuple[int, ...], positions: int, device: torch.device) -> Qwen3Target | HybridTarget:
    kind = HybridTarget if shape in HYBRID else Qwen3Target
    target = kind(target_config(shape), taps, positions, SINGLE, torch.bfloat16, device)
    _fill(target.weights(), device)
    return target


def make_draft(
    config: DraftConfig, embedding: VocabEmbedding, head: Head, positions: int, device: torch.device
) -> BlockDraft:
    draft = BlockDraft(config, embedding, head, positions, SINGLE, torch.bfloat16, device)
    _fill(draft.weights(), device)
    return draft


@dataclass(frozen=True, slots=True)
class Bytes:
    """What a decode step moves at least, in bytes: weights, context's keys and values read once, states read and
    written once (in `context`).
    """

    target: int
    context: int
    draft: int

    @property
    def total(self) -> int:
        return self.target + self.context + self.draft


def step_bytes(
    target: Qwen3Config | HybridConfig, draft: DraftConfig | None, batch: int, context: int, rows: int, num_drafts: int
) -> Bytes:
    """Floor of a step with `rows` rows in all: target linears + head + K/V read + fc + draft layers + head + K x W2.

    Experts: the expected number of different ones that `rows` rows choose.
    """
    body = target.decoder
    kv = 2 * body.num_kv_heads * body.head_dim
    attention = _attention(body)
    dense = 3 * body.hidden_size * body.intermediate_size
    mlp = dense
    if target.moe is not None:
        moe = target.moe
        touched = moe.num_experts * (1 - (1 - moe.experts_per_token / moe.num_experts) ** rows)
        mlp = int(touched * 3 * body.hidden_size * moe.intermediate_size) + moe.num_experts * body.hidden_size
        mlp += 3 * body.hidden_size * (moe.shared_size or 0)
    head = body.vocab_size * body.hidden_size
    attending, states = body.num_layers, 0
    weights = body.num_layers * mlp + head
    if isinstance(target, HybridConfig):
        heads, attending = target.heads, sum(target.attends)
        recurring = body.num_layers - attending
        weights += recurring * body.hidden_size * (2 * heads.keys + 3 * heads.values + 2 * heads.value_heads)
        weights += attending * body.hidden_size * body.num_heads * body.head_dim  # the gates' projection
        states = batch * recurring * 2 * 4 * heads.value_heads * heads.key_dim * heads.value_dim
    weights += attending * attention
    read = batch * context * kv * attending
    extra = 0
    if draft is not None:
        layers = draft.decoder.num_layers
        fusion = body.hidden_size * len(draft.taps) * draft.target_hidden_size
        extra = (
            fusion
            + layers * (_attention(draft.decoder) + 3 * body.hidden_size * draft.decoder.intermediate_size)
            + head
        )
        extra += num_drafts * body.vocab_size * draft.markov.rank if draft.markov else 0
        read += batch * context * 2 * draft.decoder.num_kv_heads * draft.decoder.head_dim * layers
    return Bytes(2 * weights, 2 * read + states, 2 * extra)


def _attention(body: DecoderConfig) -> int:
    """Weights of one layer's attention without gates."""
    return body.hidden_size * 2 * (body.num_heads + body.num_kv_heads) * body.head_dim
