"""Tiny checkpoint folders as each family of tools writes them, for tests to bend."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCABULARY, TARGET_LAYERS, MASK = 16, 4, 2, 8, 24, 50, 6, 49
RANK, REDUCED = 3, 20

Config = dict[str, Any]
Tensors = dict[str, Tensor]


def backbone(layers: int = 2, **changes: Any) -> Config:
    return {
        'model_type': 'qwen3',
        'hidden_size': HIDDEN,
        'num_hidden_layers': layers,
        'num_attention_heads': HEADS,
        'num_key_value_heads': KV_HEADS,
        'head_dim': HEAD_DIM,
        'intermediate_size': MLP,
        'rms_norm_eps': 1e-6,
        'vocab_size': VOCABULARY,
        'max_position_embeddings': 128,
        'hidden_act': 'silu',
        'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000.0},
        'layer_types': ['full_attention'] * layers,
        **changes,
    }


def target_config(**changes: Any) -> Config:
    return {
        'architectures': ['Qwen3ForCausalLM'],
        'dtype': 'float32',
        'eos_token_id': 48,
        **backbone(TARGET_LAYERS),
        **changes,
    }


def zlab_config(method: Config | None = None, **changes: Any) -> Config:
    return {
        'architectures': ['DFlashDraftModel'],
        'dtype': 'float32',
        'num_target_layers': TARGET_LAYERS,
        'dflash_config': {'block_size': 5, 'mask_token_id': MASK, 'target_layer_ids': [1, 3], **(method or {})},
        **backbone(),
        **changes,
    }


def deepspec_config(**changes: Any) -> Config:
    return {
        'architectures': ['Qwen3DSparkModel'],
        'dtype': 'float32',
        'num_target_layers': TARGET_LAYERS,
        'block_size': 4,
        'mask_token_id': MASK,
        'target_layer_ids': [-1, 3],
        'markov_rank': RANK,
        'markov_head_type': 'vanilla',
        'enable_confidence_head': True,
        'confidence_head_with_markov': True,
        **backbone(),
        **changes,
    }


def speculators_config(
    kind: str = 'dflash', tokens: int | None = 4, layers: Config | None = None, **changes: Any
) -> Config:
    method = {'proposal_type': 'greedy', **({} if tokens is None else {'speculative_tokens': tokens})}
    return {
        'architectures': ['DFlashDraftModel'],
        'speculators_model_type': kind,
        'speculators_config': {'algorithm': kind, 'proposal_methods': [method]},
        'dtype': 'float32',
        'aux_hidden_state_layer_ids': [2, 4],
        'block_size': 5,
        'draft_vocab_size': VOCABULARY,
        'mask_token_id': MASK,
        'sample_from_anchor': False,
        'transformer_layer_config': backbone(**(layers or {})),
        **changes,
    }


def speculators_dspark_config(**changes: Any) -> Config:
    settings = {
        'markov_rank': RANK,
        'markov_head_type': 'vanilla',
        'enable_confidence_head': True,
        'confidence_head_with_markov': True,
    }
    return speculators_config('dspark', **(settings | changes))


def specforge_config(method: Config | None = None, **changes: Any) -> Config:
    settings = {
        'projector_type': 'dspark',
        'mask_token_id': MASK,
        'target_layer_ids': [1, 3],
        'markov_rank': RANK,
        'markov_head_type': 'vanilla',
        'enable_confidence_head': True,
    }
    return {
        'architectures': ['DSparkDraftModel'],
        'dtype': 'float32',
        'num_target_layers': TARGET_LAYERS,
        'block_size': 4,
        'dflash_config': settings | (method or {}),
        **backbone(),
        **changes,
    }


def _zeros(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> Tensors:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


def layer_tensors(prefix: str, layers: int = 2) -> Tensors:
    found: Tensors = {}
    for layer in range(layers):
        found |= _zeros(
            {
                f'{prefix}layers.{layer}.{name}.weight': shape
                for name, shape in {
                    'input_layernorm': (HIDDEN,),
                    'post_attention_layernorm': (HIDDEN,),
                    'self_attn.q_proj': (HEADS * HEAD_DIM, HIDDEN),
                    'self_attn.k_proj': (KV_HEADS * HEAD_DIM, HIDDEN),
                    'self_attn.v_proj': (KV_HEADS * HEAD_DIM, HIDDEN),
                    'self_attn.o_proj': (HIDDEN, HEADS * HEAD_DIM),
                    'self_attn.q_norm': (HEAD_DIM,),
                    'self_attn.k_norm': (HEAD_DIM,),
                    'mlp.gate_proj': (MLP, HIDDEN),
                    'mlp.up_proj': (MLP, HIDDEN),
                    'mlp.down_proj': (HIDDEN, MLP),
                }.items()
            }
        )
    return found


def target_tensors() -> Tensors:
    ends = {
        'model.embed_tokens.weight': (VOCABULARY, HIDDEN),
        'model.norm.weight': (HIDDEN,),
        'lm_head.weight': (VOCABULARY, HIDDEN),
    }
    return layer_tensors('model.', TARGET_LAYERS) | _zeros(ends)


def draft_tensors(taps: int = 2, layers: int = 2) -> Tensors:
    ends = {'fc.weight': (HIDDEN, taps * HIDDEN), 'hidden_norm.weight': (HIDDEN,), 'norm.weight': (HIDDEN,)}
    return layer_tensors('', layers) | _zeros(ends)


def markov_tensors(kind: str = 'vanilla', vocabulary: int = VOCABULARY, rank: int = RANK) -> Tensors:
    extra = {
        'vanilla': {},
        'gated': {'gate_proj.weight': (rank, HIDDEN + rank), 'gate_proj.bias': (rank,)},
        'rnn': {'joint_proj.weight': (3 * rank, 2 * rank + HIDDEN), 'joint_proj.bias': (3 * rank,)},
    }
    both = {'markov_w1.weight': (VOCABULARY, rank), 'markov_w2.weight': (vocabulary, rank)}
    return _zeros({f'markov_head.{name}': shape for name, shape in (both | extra[kind]).items()})


def confidence_tensors(with_markov: bool = True) -> Tensors:
    width = HIDDEN + RANK if with_markov else HIDDEN
    return _zeros({'confidence_head.proj.weight': (1, width), 'confidence_head.proj.bias': (1,)})


def copied_tensors() -> Tensors:
    shape = (VOCABULARY, HIDDEN)
    return _zeros({'embed_tokens.weight': shape, 'lm_head.weight': shape})


def reduced_tensors() -> Tensors:
    return {
        'lm_head.weight': torch.zeros(REDUCED, HIDDEN),
        'd2t': torch.arange(REDUCED),
        't2d': torch.zeros(VOCABULARY, dtype=torch.bool),
    }


def write(folder: Path, config: Config, tensors: Tensors | None = None, shards: int = 1) -> Path:
    """A checkpoint folder; several shards come with an index, as Hugging Face writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'config.json').write_text(json.dumps(config))
    if tensors is None:
        return folder
    if shards == 1:
        save_file(tensors, folder / 'model.safetensors')
        return folder
    index: dict[str, str] = {}
    for shard in range(shards):
        name = f'model-{shard + 1:05d}-of-{shards:05d}.safetensors'
        part = {key: tensors[key] for key in sorted(tensors)[shard::shards]}
        save_file(part, folder / name)
        index |= dict.fromkeys(part, name)
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': index}))
    return folder
