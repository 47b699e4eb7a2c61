"""Which tensors a config implies, with their shapes, and the account of a file's headers against that.

Here so that a checkpoint is judged before a byte of weights is read; the modules' own `weights()` decide again at load.
Next: checkpoint.py, which reads headers and tensors.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from specdec.errors import CheckpointError
from specdec.models.configs import DecoderConfig, DraftConfig, HybridConfig, Qwen3Config, TargetConfig
from specdec.models.weights import listed

Shape = tuple[int, ...]

# Bits per element, under the names that safetensors headers use.
DTYPE_BITS = {
    **dict.fromkeys(('F64', 'I64', 'U64', 'C64'), 64),
    **dict.fromkeys(('F32', 'I32', 'U32'), 32),
    **dict.fromkeys(('F16', 'BF16', 'I16', 'U16'), 16),
    **dict.fromkeys(('F8_E4M3', 'F8_E5M2', 'F8_E8M0', 'F8_E4M3FNUZ', 'F8_E5M2FNUZ', 'I8', 'U8', 'BOOL'), 8),
    **dict.fromkeys(('F6_E2M3', 'F6_E3M2'), 6),
    'F4': 4,
}
FLOATS = {'F32': 'float32', 'BF16': 'bfloat16', 'F16': 'float16'}

# Tensors that checkpoints carry and text generation does not use: vision towers, MTP heads, rotary tables.
IGNORED_TARGET = (r'(model\.)?visual\..*', r'mtp\..*', r'(.*\.)?rotary_emb\.inv_freq')

_IGNORED_DRAFT = (r'(.*\.)?rotary_emb\.inv_freq',)
_IGNORED_BY_DIALECT = {
    # t2d is the inverse of d2t for training; verifier_* are copies of the target's head and final norm.
    'speculators': (r't2d', r'verifier_.*'),
}


class TensorInfo(NamedTuple):
    """One tensor as the header describes it; `dtype` as safetensors spells it ('BF16')."""

    shape: Shape
    dtype: str

    @property
    def num_bytes(self) -> int:
        return (math.prod(self.shape) * DTYPE_BITS.get(self.dtype, 8) + 7) // 8


@dataclass(frozen=True, slots=True)
class TensorAccount:
    """What becomes of each tensor of a file. `misshapen` maps a name to (shape found, shape implied by the config)."""

    used: dict[str, TensorInfo]
    ignored: dict[str, TensorInfo]
    unexpected: dict[str, TensorInfo]
    missing: dict[str, Shape]
    misshapen: dict[str, tuple[Shape, Shape]]

    def check(self, where: str) -> None:
        """Raise CheckpointError unless every tensor is used or ignored and none is missing."""
        if self.misshapen:
            name, (found, implied) = next(iter(sorted(self.misshapen.items())))
            raise CheckpointError(name, found, f'config.json implies shape {implied} ({where})')
        if self.missing:
            raise CheckpointError('tensors', listed(sorted(self.missing)), f'missing from {where}')
        if self.unexpected:
            raise CheckpointError(
                'tensors', listed(sorted(self.unexpected)), f'{where} has tensors that this model has no use for'
            )


def account(found: Mapping[str, TensorInfo], implied: Mapping[str, Shape], ignore: tuple[str, ...]) -> TensorAccount:
    """Sort the tensors in `found` by what the config implies; `ignore` are regular expressions for known noise."""
    noise = re.compile('|'.join(f'(?:{pattern})' for pattern in ignore) or r'(?!)')
    extra = {name: info for name, info in found.items() if name not in implied}
    ignored = {name: info for name, info in extra.items() if noise.fullmatch(name)}
    known = {name: info for name, info in found.items() if name in implied}
    misshapen = {name: (info.shape, implied[name]) for name, info in known.items() if info.shape != implied[name]}
    return TensorAccount(
        used={name: info for name, info in known.items() if name not in misshapen},
        ignored=ignored,
        unexpected={name: info for name, info in extra.items() if name not in ignored},
        missing={name: shape for name, shape in implied.items() if name not in found},
        misshapen=misshapen,
    )


def ignored_target(config: TargetConfig) -> tuple[str, ...]:
    """Known noise in a target's files; a tied head may be stored once more and is the embedding all the same."""
    tied = isinstance(config, Qwen3Config | HybridConfig) and config.tie_embeddings
    return (*IGNORED_TARGET, r'lm_head\.weight') if tied else IGNORED_TARGET


def ignored_draft(config: DraftConfig) -> tuple[str, ...]:
    """Known noise in a draft's files, by dialect."""
    return (*_IGNORED_DRAFT, *_IGNORED_BY_DIALECT.get(config.dialect, ()))


def target_tensor_shapes(config: Qwen3Config) -> dict[str, Shape]:
    """Hugging Face names of a Qwen3 target, weights `[out, in]`."""
    decoder = config.decoder
    H, V = decoder.hidden_size, decoder.vocab_size
    shapes: dict[str, Shape] = {'model.embed_tokens.weight': (V, H), 'model.norm.weight': (H,)}
    if not config.tie_embeddings:
        shapes['lm_head.weight'] = (V, H)
    for layer in range(decoder.num_layers):
        prefix = f'model.layers.{layer}.'
        shapes |= _attention_shapes(prefix, decoder)
        if config.moe is None or not config.moe.sparse_layers[layer]:
            shapes |= _mlp_shapes(f'{prefix}mlp.', H, decoder.intermediate_size)
            continue
        shapes[f'{prefix}mlp.gate.weight'] = (config.moe.num_experts, H)
        for expert in range(config.moe.num_experts):
            shapes |= _mlp_shapes(f'{prefix}mlp.experts.{expert}.', H, config.moe.intermediate_size)
    return shapes


def draft_tensor_shapes(config: DraftConfig) -> dict[str, Shape]:
    """Names common to all dialects (after checkpoint.draft_name), weights `[out, in]`."""
    decoder, Vd = config.decoder, config.draft_vocab_size
    H, V = decoder.hidden_size, decoder.vocab_size
    shapes: dict[str, Shape] = {
        'fc.weight': (H, len(config.taps) * config.target_hidden_size),
        'hidden_norm.weight': (H,),
        'norm.weight': (H,),
    }
    for layer in range(decoder.num_layers):
        shapes |= _attention_shapes(f'layers.{layer}.', decoder)
        shapes |= _mlp_shapes(f'layers.{layer}.mlp.', H, decoder.intermediate_size)
    shapes |= _markov_shapes(config) | _confidence_shapes(config)
    if config.own_embedding:
        shapes['embed_tokens.weight'] = (V, H)
    if config.own_head:
        shapes['lm_head.weight'] = (Vd, H)
    if config.reduced_vocabulary:
        shapes['d2t'] = (Vd,)
    if config.mask_embedding:
        shapes['mask_embedding.weight'] = (1, H)
    return shapes


def _markov_shapes(config: DraftConfig) -> dict[str, Shape]:
    if config.markov is None:
        return {}
    H, r = config.decoder.hidden_size, config.markov.rank
    extra: dict[str, dict[str, Shape]] = {
        'vanilla': {},
        'gated': {'gate_proj.weight': (r, H + r), 'gate_proj.bias': (r,)},
        'rnn': {'joint_proj.weight': (3 * r, 2 * r + H), 'joint_proj.bias': (3 * r,)},
    }
    shapes: dict[str, Shape] = {
        'markov_w1.weight': (config.decoder.vocab_size, r),
        'markov_w2.weight': (config.draft_vocab_size, r),
    }
    return {f'markov_head.{name}': shape for name, shape in (shapes | extra[config.markov.kind]).items()}


def _confidence_shapes(config: DraftConfig) -> dict[str, Shape]:
    if config.confidence_with_markov is None:
        return {}
    width = config.decoder.hidden_size
    if config.confidence_with_markov and config.markov is not None:
        width += config.markov.rank
    return {'confidence_head.proj.weight': (1, width), 'confidence_head.proj.bias': (1,)}


def _attention_shapes(prefix: str, decoder: DecoderConfig) -> dict[str, Shape]:
    H, hd = decoder.hidden_size, decoder.head_dim
    queries, keys = decoder.num_heads * hd, decoder.num_kv_heads * hd
    projections = {'q_proj': (queries, H), 'k_proj': (keys, H), 'v_proj': (keys, H), 'o_proj': (H, queries)}
    shapes: dict[str, Shape] = {
        f'{prefix}input_layernorm.weight': (H,),
        f'{prefix}post_attention_layernorm.weight': (H,),
        f'{prefix}self_attn.q_norm.weight': (hd,),
        f'{prefix}self_attn.k_norm.weight': (hd,),
    }
    for name, shape in projections.items():
        shapes[f'{prefix}self_attn.{name}.weight'] = shape
        if decoder.attention_bias:
            shapes[f'{prefix}self_attn.{name}.bias'] = shape[:1]
    return shapes


def _mlp_shapes(prefix: str, H: int, intermediate: int) -> dict[str, Shape]:
    return {
        f'{prefix}gate_proj.weight': (intermediate, H),
        f'{prefix}up_proj.weight': (intermediate, H),
        f'{prefix}down_proj.weight': (H, intermediate),
    }
