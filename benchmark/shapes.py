"""Public model shapes with random weights, made on the device that runs them, and the bytes their steps must move."""

from dataclasses import dataclass

import torch

from specdec.layers.embedding import Head, VocabEmbedding
from specdec.layers.parallel import SINGLE
from specdec.layers.rotary import RopeConfig
from specdec.layers.weights import Destination
from specdec.models.configs import DecoderConfig, DraftConfig, LayerRule, MarkovConfig, MoeConfig, Qwen3Config
from specdec.models.draft.block_draft import BlockDraft
from specdec.models.qwen3 import Qwen3Target
from specdec.models.weights import Decision

VOCABULARY = 151936
ROPE = RopeConfig(theta=1e6)


def _decoder(size: int, layers: int, heads: int, kv_heads: int, inner: int) -> DecoderConfig:
    return DecoderConfig(size, layers, heads, kv_heads, 128, inner, 1e-6, VOCABULARY, ROPE, 40960)


DENSE = {
    'qwen3-4b': (_decoder(2560, 36, 32, 8, 9728), True),
    'qwen3-8b': (_decoder(4096, 36, 32, 8, 12288), False),
    'qwen3-32b': (_decoder(5120, 64, 64, 8, 25600), False),
}
SPARSE = {'qwen3-30b-a3b': (_decoder(2048, 48, 32, 4, 6144), 128, 8, 768)}
SHAPES = (*DENSE, *SPARSE)


def target_config(shape: str) -> Qwen3Config:
    if shape in DENSE:
        decoder, tied = DENSE[shape]
        return Qwen3Config('Qwen3ForCausalLM', decoder, (None,) * decoder.num_layers, tied, 'bfloat16')
    decoder, experts, chosen, inner = SPARSE[shape]
    moe = MoeConfig(experts, chosen, inner, True, (True,) * decoder.num_layers)
    return Qwen3Config('Qwen3MoeForCausalLM', decoder, (None,) * decoder.num_layers, False, 'bfloat16', moe)


def draft_config(target: Qwen3Config, kind: str, block_rows: int) -> DraftConfig:
    """Five layers of the target's widths, five taps, as published drafts have. DSpark: rank 256, anchor-first."""
    body = target.decoder
    inner = body.intermediate_size
    decoder = _decoder(body.hidden_size, 5, body.num_heads, body.num_kv_heads, inner)
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
        draft_vocab_size=VOCABULARY,
        own_embedding=False,
        own_head=False,
        dtype='bfloat16',
    )


def _fill(weights: dict[str, Destination | Decision], device: torch.device) -> None:
    """Gaussian matrices whose products keep their size, norms of one."""
    generator = torch.Generator(device).manual_seed(0)
    for name, destination in weights.items():
        if isinstance(destination, Decision):
            continue
        if 'norm' in name:
            destination.view.fill_(1)
        elif destination.view.is_floating_point():
            destination.view.normal_(0, destination.shape[-1] ** -0.5, generator=generator)


def make_target(shape: str, taps: tuple[int, ...], positions: int, device: torch.device) -> Qwen3Target:
    target = Qwen3Target(target_config(shape), taps, positions, SINGLE, torch.bfloat16, device)
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
    """What a decode step reads at least, in bytes: every weight once, the context's keys and values once."""

    target: int
    context: int
    draft: int

    @property
    def total(self) -> int:
        return self.target + self.context + self.draft


def step_bytes(
    target: Qwen3Config, draft: DraftConfig | None, batch: int, context: int, rows: int, num_drafts: int
) -> Bytes:
    """Floor of a step with `rows` rows in all: target linears + head + K/V read + fc + draft layers + head + K x W2.

    Experts: the expected number of different ones that `rows` rows choose.
    """
    body = target.decoder
    kv = 2 * body.num_kv_heads * body.head_dim
    attention = body.hidden_size * (2 * body.num_heads * body.head_dim + kv)
    dense = 3 * body.hidden_size * body.intermediate_size
    mlp = dense
    if target.moe is not None:
        moe = target.moe
        touched = moe.num_experts * (1 - (1 - moe.experts_per_token / moe.num_experts) ** rows)
        mlp = int(touched * 3 * body.hidden_size * moe.intermediate_size) + moe.num_experts * body.hidden_size
    head = body.vocab_size * body.hidden_size
    weights = body.num_layers * (attention + mlp) + head
    read = batch * context * kv * body.num_layers
    extra = 0
    if draft is not None:
        layers = draft.decoder.num_layers
        fusion = body.hidden_size * len(draft.taps) * draft.target_hidden_size
        extra = fusion + layers * (attention + 3 * body.hidden_size * draft.decoder.intermediate_size) + head
        extra += num_drafts * body.vocab_size * draft.markov.rank if draft.markov else 0
        read += batch * context * kv * layers
    return Bytes(2 * weights, 2 * read, 2 * extra)
