"""Write and read the three checkpoint folders: a Hugging Face Qwen3 target, a z-lab DFlash, a DeepSpec DSpark.

The engine reads these folders with its own loader; the readers here serve training, which continues from what was
rounded to bf16 and measures what was really written. Next: train.py, the whole recipe.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from specdec.demo.data import CHAT_TEMPLATE, END_OF_TEXT, MASK
from specdec.demo.networks import Draft, DraftPlan, Target
from specdec.models.configs import DecoderConfig, RopeConfig


def write_target(folder: Path, target: Target, tokenizer: Tokenizer) -> None:
    """config.json, generation_config.json, tokenizer files, and bf16 weights under their Hugging Face names."""
    folder.mkdir(parents=True, exist_ok=True)
    end, turn_end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id('<|im_end|>')
    config = {'architectures': ['Qwen3ForCausalLM'], **_decoder_json(target.config)}
    _write_json(folder / 'config.json', config | {'eos_token_id': end, 'tie_word_embeddings': True})
    _write_json(
        folder / 'generation_config.json',
        {
            'do_sample': True,
            'temperature': 0.6,
            'top_k': 20,
            'top_p': 0.95,
            'eos_token_id': [end, turn_end],
            'pad_token_id': end,
        },
    )
    tokenizer.save(str(folder / 'tokenizer.json'))
    _write_json(
        folder / 'tokenizer_config.json',
        {
            'tokenizer_class': 'PreTrainedTokenizerFast',
            'eos_token': END_OF_TEXT,
            'pad_token': END_OF_TEXT,
            'mask_token': MASK,
            'clean_up_tokenization_spaces': False,
            'model_max_length': target.config.max_position,
            'chat_template': CHAT_TEMPLATE,
        },
    )
    _write_weights(folder, {f'model.{name}': tensor for name, tensor in target.state_dict().items()})


def write_dflash(folder: Path, draft: Draft) -> None:
    """z-lab's layout: the backbone alone, conventions under `dflash_config`."""
    plan = draft.plan
    folder.mkdir(parents=True, exist_ok=True)
    details = {
        'block_size': plan.block_rows,
        'mask_token_id': plan.mask_id,
        'target_layer_ids': list(plan.taps),
    }
    config = {'architectures': ['DFlashDraftModel'], **_decoder_json(plan.decoder), 'dflash_config': details}
    _write_json(folder / 'config.json', config | _draft_json(plan))
    _write_weights(folder, draft.state_dict())


def write_dspark(folder: Path, draft: Draft, target: Target) -> None:
    """DeepSpec's layout: flat keys, and copies of the target's embedding and head beside the draft's own weights."""
    plan = draft.plan
    folder.mkdir(parents=True, exist_ok=True)
    details = {
        'block_size': plan.block_rows,
        'mask_token_id': plan.mask_id,
        'target_layer_ids': list(plan.taps),
        'markov_rank': plan.markov_rank,
        'markov_head_type': 'vanilla',
        'enable_confidence_head': True,
        'confidence_head_with_markov': True,
    }
    config = {'architectures': ['Qwen3DSparkModel'], **_decoder_json(plan.decoder), **details}
    _write_json(folder / 'config.json', config | _draft_json(plan))
    table = target.embed_tokens.weight
    _write_weights(folder, {**draft.state_dict(), 'embed_tokens.weight': table, 'lm_head.weight': table.clone()})


def read_target(folder: Path, device: torch.device) -> Target:
    """The target as written, in fp32, frozen."""
    target = Target(_decoder_config(json.loads((folder / 'config.json').read_text())))
    weights = load_file(folder / 'model.safetensors')
    target.load_state_dict({name.removeprefix('model.'): tensor.float() for name, tensor in weights.items()})
    return target.to(device).requires_grad_(False).eval()


def read_draft(folder: Path, device: torch.device) -> Draft:
    """A draft as written, of either layout, in fp32, frozen; copies of the target's tensors are passed over."""
    config = json.loads((folder / 'config.json').read_text())
    details = config.get('dflash_config', config)
    plan = DraftPlan(
        decoder=_decoder_config(config),
        taps=tuple(details['target_layer_ids']),
        block_rows=details['block_size'],
        anchor_predicts='dflash_config' not in config,
        markov_rank=details.get('markov_rank', 0),
        mask_id=details['mask_token_id'],
        num_target_layers=config['num_target_layers'],
    )
    weights = load_file(folder / 'model.safetensors')
    for copied in {'embed_tokens.weight', 'lm_head.weight'} & set(weights):
        del weights[copied]
    draft = Draft(plan)
    draft.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return draft.to(device).requires_grad_(False).eval()


def _decoder_json(config: DecoderConfig) -> dict[str, Any]:
    return {
        'model_type': 'qwen3',
        'dtype': 'bfloat16',
        'vocab_size': config.vocab_size,
        'hidden_size': config.hidden_size,
        'num_hidden_layers': config.num_layers,
        'num_attention_heads': config.num_heads,
        'num_key_value_heads': config.num_kv_heads,
        'head_dim': config.head_dim,
        'intermediate_size': config.intermediate_size,
        'hidden_act': 'silu',
        'attention_bias': False,
        'attention_dropout': 0.0,
        'rms_norm_eps': config.rms_norm_eps,
        'initializer_range': 0.02,
        'max_position_embeddings': config.max_position,
        'layer_types': ['full_attention'] * config.num_layers,
        'sliding_window': None,
        'use_sliding_window': False,
        'rope_parameters': {'rope_type': 'default', 'rope_theta': config.rope.theta},
        'bos_token_id': None,
        'use_cache': True,
    }


def _draft_json(plan: DraftPlan) -> dict[str, Any]:
    return {'num_target_layers': plan.num_target_layers, 'tie_word_embeddings': False}


def _decoder_config(config: dict[str, Any]) -> DecoderConfig:
    return DecoderConfig(
        hidden_size=config['hidden_size'],
        num_layers=config['num_hidden_layers'],
        num_heads=config['num_attention_heads'],
        num_kv_heads=config['num_key_value_heads'],
        head_dim=config['head_dim'],
        intermediate_size=config['intermediate_size'],
        rms_norm_eps=config['rms_norm_eps'],
        vocab_size=config['vocab_size'],
        rope=RopeConfig(config['rope_parameters']['rope_theta']),
        max_position=config['max_position_embeddings'],
    )


def _write_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    rounded = {name: tensor.detach().to('cpu', torch.bfloat16).contiguous() for name, tensor in weights.items()}
    path = folder / 'model.safetensors'
    save_file(rounded, path, metadata={'format': 'pt'})
    path.chmod(0o644)  # written for its owner alone otherwise, and packages keep the mode


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')
