"""The target and its drafts as trainable PyTorch modules: dense, fp32, whole sequences at once.

The engine has modules of its own; these exist to be differentiated and to be checked against them, and their
parameter names are the checkpoints' names. Formulas: Qwen3 as in `transformers`; the DFlash block and the DSpark heads
as in docs/demo.md. Next: generate.py, text from the target.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec.models.configs import DecoderConfig


class Angles(NamedTuple):
    """cos and sin of the rotary angles, each [batch or 1, 1, rows, head_dim / 2], fp32."""

    cos: Tensor
    sin: Tensor


def rotary_angles(positions: Tensor, config: DecoderConfig) -> Angles:
    """Angles of positions [batch or 1, rows] over the full head_dim."""
    exponents = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32) / config.head_dim
    angles = positions.float()[:, None, :, None] * config.rope.theta**-exponents
    return Angles(angles.cos(), angles.sin())


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate halves (NeoX) of x [batch, heads, rows, head_dim]."""
    first, second = x.float().chunk(2, -1)
    cos, sin = angles
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        self.head_dim, self.group = head_dim, config.num_heads // config.num_kv_heads
        self.q_proj = nn.Linear(hidden, config.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))

    def queries(self, x: Tensor, angles: Angles) -> Tensor:
        """x [batch, rows, hidden] -> [batch, heads, rows, head_dim]."""
        return rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2), angles).to(x.dtype)

    def keys_values(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """x [batch, rows, hidden] -> two of [batch, kv_heads, rows, head_dim]."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2), angles)
        return keys.to(x.dtype), self._heads(self.v_proj(x)).transpose(1, 2).to(x.dtype)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attend, causally where `mask` is None, else where mask [batch, 1, rows, keys] is True; -> [.., hidden]."""
        keys, values = (x.repeat_interleave(self.group, 1) for x in (keys, values))
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A Qwen3 layer; `context` adds keys and values in front of the rows' own."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        angles: Angles,
        context: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """x [batch, rows, hidden]; without context and mask: causal self-attention."""
        normed = self.input_layernorm(x)
        queries = self.self_attn.queries(normed, angles)
        keys, values = self.self_attn.keys_values(normed, angles)
        if context is not None:
            keys, values = torch.cat([context[0], keys], 2), torch.cat([context[1], values], 2)
        x = x + self.self_attn(queries, keys, values, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    """Qwen3ForCausalLM with a tied head; checkpoint names are these with `model.` in front."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        initialise(self, config.num_layers)

    def forward(self, ids: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """ids [batch, rows] -> final-normed hidden [batch, rows, hidden] and the outputs of the layers `taps`,
        before the final norm, side by side [batch, rows, taps * hidden] (None without taps).
        """
        angles = rotary_angles(torch.arange(ids.shape[1], device=ids.device)[None], self.config)
        x, tapped = self.embed_tokens(ids), []
        for index, layer in enumerate(self.layers):
            x = layer(x, angles)
            if index in taps:
                tapped.append(x)
        return self.norm(x), torch.cat(tapped, -1) if tapped else None

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.embed_tokens.weight)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What a draft is, besides its layers.

    `taps`: target layers it reads; `block_rows`: rows of one block; `anchor_predicts`: row k predicts the token k + 1
    after the anchor (DSpark), else row k the token k after it and row 0 nothing (DFlash); `markov_rank` 0: no heads.
    """

    decoder: DecoderConfig
    taps: tuple[int, ...]
    block_rows: int
    anchor_predicts: bool
    markov_rank: int
    mask_id: int
    num_target_layers: int

    @property
    def num_proposals(self) -> int:
        return self.block_rows if self.anchor_predicts else self.block_rows - 1


class MarkovHead(nn.Module):
    """The vanilla head: a bias on a row's logits, of low rank, from the token before it."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)


class Draft(nn.Module):
    """DFlash backbone, with DSpark's two heads where `plan.markov_rank` > 0. Embedding and head are the target's."""

    def __init__(self, plan: DraftPlan) -> None:
        super().__init__()
        self.plan = plan
        config = plan.decoder
        hidden = config.hidden_size
        self.fc = nn.Linear(len(plan.taps) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        if plan.markov_rank:
            self.markov_head = MarkovHead(config.vocab_size, plan.markov_rank)
            self.confidence_head = ConfidenceHead(hidden + plan.markov_rank)
        initialise(self, config.num_layers)

    def forward(self, taps: Tensor, anchors: Tensor, starts: Tensor, embedding: nn.Embedding) -> Tensor:
        """Many blocks of each sequence in one pass.

        taps [batch, length, taps * hidden] of a whole sequence, starts [batch, blocks] the anchors' positions, anchors
        [batch, blocks] their ids -> final-normed rows that propose, [batch, blocks, num_proposals, hidden].
        A block sees the taps before its own start and its own rows, nothing else.
        """
        plan, (batch, blocks) = self.plan, starts.shape
        rows = plan.block_rows
        ids = anchors.new_full((batch, blocks, rows), plan.mask_id)
        ids[:, :, 0] = anchors
        offsets = torch.arange(rows, device=starts.device)
        angles = rotary_angles((starts[:, :, None] + offsets).flatten(1), plan.decoder)
        context = self.hidden_norm(self.fc(taps))
        positions = torch.arange(taps.shape[1], device=taps.device)
        context_angles = rotary_angles(positions[None], plan.decoder)
        mask = block_mask(starts, taps.shape[1], rows)
        x = embedding(ids.flatten(1)).to(context.dtype)
        for layer in self.layers:
            x = layer(x, angles, layer.self_attn.keys_values(context, context_angles), mask)
        hidden = self.norm(x).view(batch, blocks, rows, -1)
        return hidden[:, :, rows - plan.num_proposals :]

    def markov_bias(self, previous: Tensor) -> Tensor:
        """Ids of the tokens before the proposed ones [...] -> logit bias [..., vocab]."""
        return self.markov_head.markov_w2(self.markov_head.markov_w1(previous))

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Rows [..., hidden] and the tokens before the proposed ones [...] -> logits of being accepted [...]."""
        features = torch.cat([hidden, self.markov_head.markov_w1(previous).to(hidden.dtype)], -1)
        return self.confidence_head.proj(features).squeeze(-1)


def block_mask(starts: Tensor, length: int, rows: int) -> Tensor:
    """starts [batch, blocks] -> bool [batch, 1, blocks * rows, length + blocks * rows], True where a row may look."""
    batch, blocks = starts.shape
    before = torch.arange(length, device=starts.device) < starts[:, :, None]
    owner = torch.arange(blocks, device=starts.device).repeat_interleave(rows)
    own = (owner[:, None] == owner).expand(batch, -1, -1)
    return torch.cat([before.repeat_interleave(rows, 1), own], -1)[:, None]


def initialise(model: nn.Module, num_layers: int) -> None:
    """Normal weights of deviation 0.02, smaller by sqrt(2 layers) where a sublayer writes to the residual stream."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            continue
        writes = name.endswith(('o_proj.weight', 'down_proj.weight'))
        nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers) if writes else 0.02)
    for name, parameter in model.named_parameters():
        if name.endswith('bias'):
            nn.init.zeros_(parameter)
