"""Tiny hybrid targets: transformers' own models with random weights, written as each kind of checkpoint is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.helpers import checkpoints as tiny

SMALL = {
    'vocab_size': 101,
    'hidden_size': 32,
    'intermediate_size': 48,
    'num_hidden_layers': 4,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 16,
    'max_position_embeddings': 2048,
    'rope_parameters': {
        'rope_type': 'default',
        'rope_theta': 10000.0,
        'partial_rotary_factor': 0.5,
        'mrope_section': [2, 1, 1],
        'mrope_interleaved': True,
    },
    'layer_types': ['linear_attention', 'full_attention', 'linear_attention', 'linear_attention'],
    'linear_conv_kernel_dim': 4,
    'linear_key_head_dim': 8,
    'linear_value_head_dim': 16,
    'linear_num_key_heads': 2,
    'linear_num_value_heads': 4,
    'tie_word_embeddings': False,
    'bos_token_id': None,
    'eos_token_id': 100,
    'pad_token_id': None,
}
EXPERTS = {
    'num_experts': 6,
    'num_experts_per_tok': 2,
    'moe_intermediate_size': 24,
    'shared_expert_intermediate_size': 20,
}
KINDS = {
    'dense': (Qwen3_5TextConfig, Qwen3_5ForCausalLM, {}),
    'moe': (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, EXPERTS),
    'next': (Qwen3NextConfig, Qwen3NextForCausalLM, EXPERTS),
}


def random_hybrid(kind: str = 'dense', seed: int = 0, **changes: Any) -> Any:
    """A model whose every weight matters: norms differ from 1, gates open and close, states last 1 to 50 tokens."""
    config_class, model_class, extra = KINDS[kind]
    model = model_class(config_class(**{**SMALL, **extra, **changes})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith('linear_attn.norm.weight'):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith('A_log'):
                parameter.copy_(noise - 2)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            elif 'conv1d' in name:
                parameter.copy_(0.6 * noise)
            else:
                parameter.copy_(noise * (0.5 if 'embed' in name else parameter.shape[-1] ** -0.5))
    return model


ENGINE = {
    'vocab_size': tiny.VOCABULARY,
    'hidden_size': tiny.HIDDEN,
    'num_hidden_layers': tiny.TARGET_LAYERS,
    'head_dim': 8,
    'layer_types': ['linear_attention', 'linear_attention', 'full_attention'] * 2,
    'eos_token_id': 48,
}
SHARES = {'down_proj': 0.2, 'o_proj': 0.4, 'out_proj': 0.5}


def write_for_engines(folder: Path, kind: str = 'dense', seed: int = 4, **changes: Any) -> Path:
    """A target of the size that drafts of tests/helpers/engines.py are made for, and as much of a table as theirs."""
    model = random_hybrid(kind, seed, **{**ENGINE, **changes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if 'embed' in name:
                parameter.mul_(2)
            if name == 'lm_head.weight':
                parameter.mul_(3)
            for part, share in SHARES.items():
                if part in name:
                    parameter.mul_(share)
    model.save_pretrained(folder)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> None:
    """Bend a saved checkpoint: its config.json and its tensors, in place."""
    path, weights = folder / 'config.json', folder / 'model.safetensors'
    config, tensors = json.loads(path.read_text()), load_file(weights)
    change(config, tensors)
    path.write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights, metadata={'format': 'pt'})


def as_vision_model(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The layout of a published vision model: the text part nested and under a prefix, a tower beside it."""
    text = dict(config)
    architecture = text.pop('architectures')[0].replace('ForCausalLM', 'ForConditionalGeneration')
    ties = text.pop('tie_word_embeddings', False)
    config.clear()
    config.update(architectures=[architecture], model_type='qwen3_5', text_config=text, tie_word_embeddings=ties)
    config.update(vision_config={'depth': 1}, image_token_id=90)
    for name in list(tensors):
        if name.startswith(('model.layers.', 'model.embed_tokens', 'model.norm')):
            tensors[name.replace('model.', 'model.language_model.', 1)] = tensors.pop(name)
    tensors['model.visual.blocks.0.attn.qkv.weight'] = torch.zeros(3, 2)
    tensors['mtp.layers.0.input_layernorm.weight'] = torch.zeros(32)


def stack_experts(_config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """One tensor for all experts of a layer, as Qwen3.5's files have them."""
    names = [name for name in tensors if '.experts.0.gate_proj' in name]
    for name in names:
        stem = name.split('.0.gate_proj')[0]
        each: dict[str, list[Tensor]] = {part: [] for part in ('gate_proj', 'up_proj', 'down_proj')}
        for part, found in each.items():
            while (key := f'{stem}.{len(found)}.{part}.weight') in tensors:
                found.append(tensors.pop(key))
        gates = torch.stack(each['gate_proj']), torch.stack(each['up_proj'])
        tensors[f'{stem}.gate_up_proj'] = torch.cat(gates, 1)
        tensors[f'{stem}.down_proj'] = torch.stack(each['down_proj'])
