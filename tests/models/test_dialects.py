import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from specdec.errors import CheckpointError
from specdec.layers.embedding import Head, VocabEmbedding
from specdec.layers.parallel import SINGLE
from specdec.models.checkpoint import draft_tensors, read_draft, read_target
from specdec.models.configs import DraftConfig, LayerRule, MarkovConfig
from specdec.models.draft.block_draft import BlockDraft
from specdec.models.draft_dialects import draft_name
from specdec.models.tensor_table import draft_tensor_shapes
from specdec.models.weights import Decision
from tests.helpers import checkpoints as tiny

SLIDING = {
    'layer_types': ['sliding_attention', 'full_attention'],
    'sliding_window': 8,
    'use_sliding_window': True,
}
CPU = torch.device('cpu')


def draft(tmp_path, config, tensors=None, target=None) -> DraftConfig:
    return read_draft(tiny.write(tmp_path, config, tiny.draft_tensors() if tensors is None else tensors), target)


def deepspec_tensors(kind='vanilla'):
    return tiny.draft_tensors() | tiny.copied_tensors() | tiny.markov_tensors(kind) | tiny.confidence_tensors()


def refused(tmp_path, config, *words, tensors=None, target=None):
    with pytest.raises(CheckpointError) as caught:
        draft(tmp_path, config, tensors, target)
    text = str(caught.value)
    assert '\n' not in text
    for word in words:
        assert word in text, text


# --- each dialect, its own conventions


def test_zlab(tmp_path):
    config = draft(tmp_path, tiny.zlab_config())
    assert (config.dialect, config.kind) == ('zlab', 'dflash')
    assert config.taps == (1, 3)
    assert (config.block_rows, config.num_proposals, config.default_tokens) == (5, 4, 4)
    assert not config.anchor_predicts
    assert config.mask_id == tiny.MASK
    assert config.rules == (LayerRule(), LayerRule())
    assert config.markov is None
    assert config.confidence_with_markov is None
    assert not config.own_embedding
    assert not config.own_head
    assert config.num_target_layers == tiny.TARGET_LAYERS


def test_zlab_older_layout_reads_the_same(tmp_path):
    old = tiny.zlab_config(
        {'block_size': None},
        block_size=5,
        rope_parameters=None,
        rope_theta=10000,
        rope_scaling=None,
        layer_types=None,
        auto_map={'AutoModel': 'dflash.DFlashDraftModel'},
    )
    assert draft(tmp_path / 'old', old) == draft(tmp_path / 'new', tiny.zlab_config())


def test_zlab_taps_and_mask_at_top_level(tmp_path):
    config = tiny.zlab_config(
        {'target_layer_ids': None, 'mask_token_id': None}, target_layer_ids=[1, 3], mask_token_id=49
    )
    assert draft(tmp_path / 'top', config) == draft(tmp_path / 'nested', tiny.zlab_config())


@pytest.mark.parametrize(
    ('changes', 'method', 'rules'),
    [
        ({}, {}, [LayerRule(True, 8), LayerRule(False)]),
        ({'is_causal': False}, {}, [LayerRule(False, 8), LayerRule(False)]),
        ({'is_causal': True}, {}, [LayerRule(True, 8), LayerRule(True)]),
        ({}, {'causal': False}, [LayerRule(False, 8), LayerRule(False)]),
        ({'use_sliding_window': False}, {}, [LayerRule(True), LayerRule(False)]),
        ({}, {'swa_window_size': 4}, [LayerRule(True, 4), LayerRule(False)]),
        ({'layer_types': None, 'use_sliding_window': None}, {'use_swa': True}, [LayerRule(False, 8)] * 2),
        ({'layer_types': None, 'use_sliding_window': False}, {}, [LayerRule()] * 2),
    ],
)
def test_zlab_rules(tmp_path, changes, method, rules):
    assert list(draft(tmp_path, tiny.zlab_config(method, **SLIDING | changes)).rules) == rules


def test_zlab_constants(tmp_path):
    method = {'input_embedding_scale': 2.0, 'output_multiplier': 0.5}
    config = draft(tmp_path, tiny.zlab_config(method, final_logit_softcapping=30.0))
    assert (config.input_scale, config.output_multiplier, config.softcap) == (2.0, 0.5, 30.0)


def test_deepspec_dspark(tmp_path):
    config = draft(tmp_path, tiny.deepspec_config(), deepspec_tensors())
    assert (config.dialect, config.kind) == ('deepspec', 'dspark')
    assert config.taps == (-1, 3)
    assert config.anchor_predicts
    assert (config.block_rows, config.num_proposals) == (4, 4)
    assert config.markov == MarkovConfig('vanilla', tiny.RANK)
    assert config.confidence_with_markov is True
    assert config.own_embedding
    assert config.own_head


def test_deepspec_rank_0_is_dflash_and_still_anchor_first(tmp_path):
    settings = {
        'markov_rank': 0,
        'markov_head_type': None,
        'enable_confidence_head': False,
        'confidence_head_with_markov': None,
    }
    config = draft(tmp_path, tiny.deepspec_config(**settings), tiny.draft_tensors() | tiny.copied_tensors())
    assert config.kind == 'dflash'
    assert config.anchor_predicts
    assert config.num_proposals == 4
    assert config.markov is None


def test_noise_inherited_from_a_hybrid_target(tmp_path):
    noise = {
        'rope_parameters': {
            'rope_type': 'default',
            'rope_theta': 10000.0,
            'partial_rotary_factor': 0.25,
            'mrope_section': [1, 1, 2],
        },
        'attn_output_gate': True,
        'linear_num_value_heads': 4,
        'model_type': 'qwen3_5_text',
    }
    plain = draft(tmp_path / 'plain', tiny.deepspec_config(), deepspec_tensors())
    assert draft(tmp_path / 'noisy', tiny.deepspec_config(**noise), deepspec_tensors()) == plain
    mrope = {'rope_parameters': {'rope_type': 'mrope', 'rope_theta': 10000.0}}
    assert draft(tmp_path / 'mrope', tiny.deepspec_config(**mrope), deepspec_tensors()) == plain


def test_gated_projections_are_told_by_their_shape(tmp_path):
    tensors = tiny.draft_tensors()
    tensors['layers.0.self_attn.q_proj.weight'] = torch.zeros(2 * tiny.HEADS * tiny.HEAD_DIM, tiny.HIDDEN)
    refused(tmp_path, tiny.zlab_config(), 'gated query projections', tensors=tensors)


@pytest.mark.parametrize(('tokens', 'expected'), [(4, 4), (2, 2), (None, 4)])
def test_speculators_default_tokens(tmp_path, tokens, expected):
    config = draft(tmp_path, tiny.speculators_config(tokens=tokens))
    assert (config.dialect, config.kind, config.taps) == ('speculators', 'dflash', (1, 3))
    assert (config.num_proposals, config.default_tokens) == (4, expected)


def test_speculators_taps_reach_embedding_and_last_layer(tmp_path):
    target = read_target(tiny.write(tmp_path / 'target', tiny.target_config()))
    config = tiny.speculators_config(aux_hidden_state_layer_ids=[0, tiny.TARGET_LAYERS])
    assert draft(tmp_path / 'draft', config, target=target).taps == (-1, tiny.TARGET_LAYERS - 1)


@pytest.mark.parametrize(
    ('changes', 'rules'),
    [
        ({}, [LayerRule(True, 8), LayerRule()]),
        ({'sliding_window_non_causal': True}, [LayerRule(False, 8), LayerRule()]),
    ],
)
def test_speculators_causality_is_per_layer(tmp_path, changes, rules):
    assert list(draft(tmp_path, tiny.speculators_config(layers=SLIDING, **changes)).rules) == rules


@pytest.mark.parametrize(
    ('key', 'tokens', 'anchor_predicts'),
    [(True, 5, True), (False, 4, False), (None, 5, True), (None, 4, False), (None, None, False), (False, 2, False)],
)
def test_speculators_dspark_layout(tmp_path, key, tokens, anchor_predicts):
    tensors = tiny.draft_tensors() | tiny.markov_tensors() | tiny.confidence_tensors()
    config = draft(tmp_path, tiny.speculators_dspark_config(sample_from_anchor=key, tokens=tokens), tensors)
    assert config.kind == 'dspark'
    assert config.anchor_predicts is anchor_predicts
    assert config.num_proposals == (5 if anchor_predicts else 4)


def test_speculators_dspark_defaults_are_the_librarys(tmp_path):
    absent = dict.fromkeys(('markov_head_type', 'enable_confidence_head', 'confidence_head_with_markov'))
    tensors = tiny.draft_tensors() | tiny.markov_tensors() | tiny.confidence_tensors()
    config = draft(tmp_path / 'a', tiny.speculators_dspark_config(**absent), tensors)
    assert config.markov == MarkovConfig('vanilla', tiny.RANK)
    assert config.confidence_with_markov is True
    refused(tmp_path / 'b', tiny.speculators_dspark_config(markov_rank=None), 'markov_rank=256', tensors=tensors)


def test_reduced_vocabulary(tmp_path):
    tensors = (
        tiny.draft_tensors()
        | tiny.markov_tensors('gated', tiny.REDUCED)
        | tiny.confidence_tensors()
        | tiny.reduced_tensors()
    )
    changes = {'draft_vocab_size': tiny.REDUCED, 'markov_head_type': 'gated'}
    config = draft(tmp_path / 'a', tiny.speculators_dspark_config(**changes), tensors)
    assert config.reduced_vocabulary
    assert config.draft_vocab_size == tiny.REDUCED
    assert config.own_head
    untold = tiny.speculators_dspark_config(**changes | {'draft_vocab_size': None})
    assert draft(tmp_path / 'b', untold, tensors) == config
    del tensors['d2t']
    refused(tmp_path / 'c', tiny.speculators_dspark_config(**changes), "tensors='d2t': missing", tensors=tensors)


def test_speculators_may_store_what_the_target_owns(tmp_path):
    verifier = {'verifier_norm.weight': torch.zeros(3), 'verifier_lm_head.weight': torch.zeros(3)}
    config = draft(tmp_path, tiny.speculators_config(), tiny.draft_tensors() | tiny.copied_tensors() | verifier)
    assert config.own_embedding
    assert config.own_head


def test_specforge(tmp_path):
    tensors = tiny.draft_tensors() | tiny.markov_tensors('rnn') | tiny.confidence_tensors(with_markov=False)
    config = draft(tmp_path, tiny.specforge_config({'markov_head_type': 'rnn', 'attention_mode': 'gqa'}), tensors)
    assert (config.dialect, config.kind, config.taps) == ('specforge', 'dspark', (1, 3))
    assert config.anchor_predicts
    assert config.num_proposals == 4
    assert config.markov == MarkovConfig('rnn', tiny.RANK)
    assert config.confidence_with_markov is False


@pytest.mark.parametrize(('alpha', 'expected'), [(0.1, False), (0.0, None), (None, None)])
def test_specforge_confidence_follows_its_training_weight(tmp_path, alpha, expected):
    tensors = tiny.draft_tensors() | tiny.markov_tensors()
    tensors |= tiny.confidence_tensors(with_markov=False) if expected is False else {}
    method = {'enable_confidence_head': None, 'confidence_head_alpha': alpha}
    assert draft(tmp_path, tiny.specforge_config(method), tensors).confidence_with_markov is expected


def test_specforge_without_heads(tmp_path):
    method = {'markov_rank': None, 'enable_confidence_head': False}
    config = draft(tmp_path, tiny.specforge_config(method))
    assert (config.kind, config.markov, config.confidence_with_markov) == ('dspark', None, None)


def test_one_draft_in_two_dialects(tmp_path):
    zlab = draft(tmp_path / 'zlab', tiny.zlab_config(num_target_layers=None, **SLIDING))
    speculators = draft(tmp_path / 'speculators', tiny.speculators_config(layers=SLIDING))
    assert replace(speculators, dialect='zlab') == zlab


def test_one_dspark_draft_in_three_dialects(tmp_path):
    tensors = tiny.draft_tensors() | tiny.markov_tensors('gated') | tiny.confidence_tensors()
    heads = {'markov_head_type': 'gated', 'confidence_head_with_markov': True}
    configs = [
        tiny.deepspec_config(**heads, target_layer_ids=[1, 3], num_target_layers=None),
        tiny.specforge_config(heads, num_target_layers=None),
        tiny.speculators_dspark_config(**heads, sample_from_anchor=True, block_size=4),
    ]
    read = [draft(tmp_path / str(i), config, tensors) for i, config in enumerate(configs)]
    assert replace(read[1], dialect='deepspec') == replace(read[2], dialect='deepspec') == read[0]


# --- names


@pytest.mark.parametrize(
    ('stored', 'name'),
    [
        ('fc.weight', 'fc.weight'),
        ('model.layers.0.mlp.up_proj.weight', 'layers.0.mlp.up_proj.weight'),
        ('logit_head.markov_head.markov_w1.weight', 'markov_head.markov_w1.weight'),
        ('model.logit_head.confidence_head.proj.bias', 'confidence_head.proj.bias'),
        ('midlayer.self_attn.q_norm.weight', 'layers.0.self_attn.q_norm.weight'),
        ('encoder.fc.weight', 'fc.weight'),
        ('encoder.output_norm_enc.weight', 'hidden_norm.weight'),
        ('draft_id_to_target_id', 'd2t'),
        ('mask_embedding', 'mask_embedding.weight'),
        ('lm_head.weight', 'lm_head.weight'),
    ],
)
def test_names_found_in_the_wild(stored, name):
    assert draft_name(stored) == name


def test_prefixed_file_reads_like_a_bare_one(tmp_path):
    tensors = tiny.draft_tensors() | tiny.markov_tensors() | tiny.confidence_tensors(with_markov=False)
    wrapped = {
        ('logit_head.' if name.startswith(('markov', 'confidence')) else 'model.') + name: tensor
        for name, tensor in tensors.items()
    }
    bare = draft(tmp_path / 'bare', tiny.specforge_config(), tensors)
    assert draft(tmp_path / 'wrapped', tiny.specforge_config(), wrapped) == bare
    assert {name for name, _ in draft_tensors(tmp_path / 'wrapped')} == set(tensors)
    doubled = tensors | {'model.fc.weight': tensors['fc.weight'].clone()}
    refused(tmp_path / 'doubled', tiny.specforge_config(), 'fc.weight', 'two names', tensors=doubled)


@pytest.mark.parametrize('shape', [(tiny.HIDDEN,), (1, tiny.HIDDEN)])
def test_mask_embedding_in_either_shape(tmp_path, shape):
    tensors = tiny.draft_tensors() | {'mask_embedding.weight': torch.zeros(shape)}
    assert draft(tmp_path, tiny.zlab_config(), tensors).mask_embedding
    assert dict(draft_tensors(tmp_path))['mask_embedding.weight'].shape == (1, tiny.HIDDEN)


@pytest.mark.parametrize(
    ('config', 'tensors'),
    [
        (tiny.zlab_config(attention_bias=True), None),
        (tiny.zlab_config(), {'mask_embedding': torch.zeros(tiny.HIDDEN)}),
        (tiny.deepspec_config(), deepspec_tensors()),
        (tiny.deepspec_config(markov_head_type='gated'), deepspec_tensors('gated')),
        (tiny.deepspec_config(markov_head_type='rnn'), deepspec_tensors('rnn')),
        (
            tiny.speculators_config(draft_vocab_size=tiny.REDUCED),
            tiny.reduced_tensors(),
        ),
    ],
)
def test_the_draft_table_is_the_models_own(tmp_path, config, tensors):
    stored = tiny.draft_tensors() | (tensors or {})
    if config.get('attention_bias'):
        stored |= {
            name.replace('proj.weight', 'proj.bias'): torch.zeros(tensor.shape[0])
            for name, tensor in stored.items()
            if 'self_attn' in name and 'proj' in name
        }
    read = draft(tmp_path, config, stored)
    embedding = VocabEmbedding(tiny.VOCABULARY, tiny.HIDDEN, SINGLE, torch.float32, CPU)
    model = BlockDraft(read, embedding, Head(embedding), 8, SINGLE, torch.float32, CPU)
    assert {name: place.shape for name, place in model.weights().items()} == draft_tensor_shapes(read)
    assert all(name in stored for name, place in model.weights().items() if isinstance(place, Decision))


# --- refusals


@pytest.mark.parametrize(
    ('config', 'words'),
    [
        (tiny.zlab_config(architectures=None), ['architectures=None']),
        (tiny.zlab_config(architectures=[]), ['architectures=[]']),
        (tiny.zlab_config(architectures=['DFlash2DraftModel']), ['DFlash 2']),
        (tiny.zlab_config(architectures=['Qwen35DSparkModel']), ['Qwen3.5-native']),
        (tiny.zlab_config(architectures=['DSparkDraftModel']), ['DSparkDraftModel', 'projector_type']),
        (tiny.zlab_config(architectures=['Qwen3ForCausalLM']), ['Qwen3ForCausalLM', 'not a draft']),
        (tiny.zlab_config(dflash_config=None), ['dflash_config=None']),
        (tiny.zlab_config(dflash_config=[1]), ['dflash_config=[1]', 'object']),
        (tiny.zlab_config({'projector_type': 'domino'}), ["dflash_config.projector_type='domino'"]),
        (tiny.speculators_config('eagle3'), ["speculators_model_type='eagle3'"]),
        (tiny.zlab_config(num_experts=8), ['num_experts=8']),
        (tiny.zlab_config({'n_routed_experts': 8}), ['dflash_config.n_routed_experts=8']),
        (tiny.speculators_config(layers={'num_experts': 8}), ['transformer_layer_config.num_experts=8']),
        (tiny.zlab_config({'attention_sink_bias': True}), ['attention_sink_bias=True', 'sinks']),
        (tiny.zlab_config({'attention_value_scale': 2.0}), ['attention_value_scale=2.0']),
        (tiny.zlab_config(dflash_query_causal=True), ['dflash_query_causal=True']),
        (tiny.zlab_config(log_snr_conditioning=True), ['log_snr_conditioning=True']),
        (tiny.zlab_config(enable_qwen35_gated_q_proj=True), ['enable_qwen35_gated_q_proj=True']),
        (tiny.zlab_config(has_lm_head=False), ['has_lm_head=False']),
        (tiny.zlab_config({'use_aux_hidden_state': False}), ['use_aux_hidden_state=False']),
        (tiny.zlab_config(is_neox_style=False), ['is_neox_style=False']),
        (tiny.zlab_config(logit_scale=0.5), ['logit_scale=0.5']),
        (tiny.zlab_config({'selector_rank': 4}), ['selector_rank=4', 'DFlash 2']),
        (tiny.zlab_config(dspark_block_size=5), ['dspark_block_size=5', 'bundled']),
        (tiny.zlab_config(markov_rank=4), ['markov_rank=4']),
        (tiny.zlab_config({'markov_rank': 4}), ['dflash_config.markov_rank=4']),
        (tiny.speculators_config(markov_rank=4), ['markov_rank=4']),
        (tiny.zlab_config({'enable_confidence_head': True}), ['enable_confidence_head=True']),
        (tiny.zlab_config(quantization_config={'quant_method': 'awq'}), ["quantization_config='awq'"]),
        (tiny.speculators_config(layers={'quantization_config': {}, 'model_type': 'gemma3'}), ['quantization_config']),
        (tiny.speculators_config(layers={'model_type': 'gemma3'}), ["model_type='gemma3'"]),
        (tiny.zlab_config(block_size=8), ['block_size=8', 'contradicts dflash_config.block_size=5']),
        (tiny.zlab_config(target_layer_ids=[1, 2]), ['target_layer_ids=[1, 2]', 'contradicts']),
        (tiny.zlab_config(mask_token_id=3), ['mask_token_id=3', 'contradicts']),
        (tiny.zlab_config({'block_size': None}), ['block_size=None', 'missing']),
        (tiny.zlab_config({'block_size': 1}), ['block_size=1', '>= 2']),
        (tiny.zlab_config({'target_layer_ids': None}), ['target_layer_ids=None', 'missing']),
        (tiny.zlab_config({'target_layer_ids': []}), ['target_layer_ids=[]']),
        (tiny.zlab_config({'target_layer_ids': [3, 1]}), ['target_layer_ids=[3, 1]', 'ascending']),
        (tiny.zlab_config({'target_layer_ids': [-2, 1]}), ['target_layer_ids=[-2, 1]', '>= -1']),
        (tiny.speculators_config(aux_hidden_state_layer_ids=[-1, 2]), ['aux_hidden_state_layer_ids', '>= 0']),
        (tiny.zlab_config({'mask_token_id': None}), ['mask_token_id=None', 'missing']),
        (tiny.zlab_config({'mask_token_id': 50}), ['mask_token_id=50', 'vocab_size=50']),
        (tiny.zlab_config(rope_parameters=None), ['rope_theta=None', 'missing']),
        (tiny.zlab_config(rope_parameters={'rope_type': 'longrope', 'rope_theta': 1e4}), ['longrope']),
        (tiny.zlab_config(is_causal=True, causal=False), ['is_causal=True', 'contradicts causal=False']),
        (tiny.zlab_config(layer_types=['full_attention']), ['layer_types', 'num_hidden_layers=2']),
        (tiny.zlab_config(layer_types=['chunked_attention', 'full_attention']), ['chunked_attention']),
        (tiny.zlab_config(layer_types=None, use_sliding_window=True, sliding_window=8), ['layer_types=None']),
        (tiny.zlab_config(layer_types=['sliding_attention'] * 2), ['sliding_window=None', 'missing']),
        (tiny.zlab_config(hidden_act='gelu'), ['hidden_act']),
        (tiny.deepspec_config(markov_rank=None), ['markov_rank=None', 'missing']),
        (tiny.deepspec_config(markov_head_type='lstm'), ["markov_head_type='lstm'", 'vanilla, gated, rnn']),
        (tiny.deepspec_config(is_causal=True), ['is_causal=True']),
        (tiny.deepspec_config(sample_from_anchor=False), ['sample_from_anchor=False', 'anchor-first']),
        (tiny.deepspec_config(output_multiplier=2.0), ['output_multiplier=2.0']),
        (tiny.deepspec_config(**SLIDING), ['layer_types']),
        (tiny.deepspec_config(draft_vocab_size=20), ['draft_vocab_size=20']),
        (tiny.specforge_config({'attention_mode': 'mla'}), ["attention_mode='mla'"]),
        (tiny.speculators_config(layers={'partial_rotary_factor': 0.25}), ['partial_rotary_factor=0.25']),
        (tiny.speculators_config(draft_vocab_size=51), ['draft_vocab_size=51']),
        (tiny.speculators_config(tokens=5), ['speculative_tokens=5', 'proposes 4']),
        (tiny.speculators_config(transformer_layer_config=None), ['transformer_layer_config.']),
        (tiny.speculators_config(speculators_config={'proposal_methods': 3}), ['proposal_methods=3']),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path, config, words):
    refused(tmp_path, config, *words, 'config.json')


def without(name):
    tensors = tiny.draft_tensors()
    del tensors[name]
    return tensors


@pytest.mark.parametrize(
    ('config', 'tensors', 'words'),
    [
        (tiny.zlab_config(), tiny.draft_tensors(taps=3), ['number of taps=2', 'says 3']),
        (tiny.zlab_config(head_dim=4), tiny.draft_tensors(), ['head_dim=4', 'says 8']),
        (tiny.zlab_config(num_attention_heads=2), tiny.draft_tensors(), ['num_attention_heads=2', 'gated']),
        (tiny.zlab_config(num_attention_heads=8), tiny.draft_tensors(), ['num_attention_heads=8', 'says 4']),
        (tiny.zlab_config(num_key_value_heads=4), tiny.draft_tensors(), ['num_key_value_heads=4', 'says 2']),
        (tiny.zlab_config(intermediate_size=9), tiny.draft_tensors(), ['mlp.down_proj.weight', '(16, 9)']),
        (tiny.zlab_config(), without('norm.weight'), ["'norm.weight'", 'missing']),
        (tiny.zlab_config(), tiny.draft_tensors(layers=3), ['layers.2.', 'no use for']),
        (tiny.zlab_config(), tiny.draft_tensors() | tiny.markov_tensors(), ['markov_rank=0', 'says 3']),
        (
            tiny.zlab_config(),
            tiny.draft_tensors() | {'candidate_selector.hidden_projection.weight': torch.zeros(1)},
            ['DFlash 2'],
        ),
        (tiny.zlab_config(), tiny.draft_tensors() | {'layers.0.mlp.gate.weight': torch.zeros(1)}, ['experts']),
        (
            tiny.zlab_config(),
            tiny.draft_tensors() | {'layers.0.mlp.up_proj.weight_scale': torch.zeros(1)},
            ['quantised'],
        ),
        (
            tiny.zlab_config(),
            tiny.draft_tensors() | {'fc.weight': torch.zeros(16, 32, dtype=torch.int8)},
            ["fc.weight='I8'"],
        ),
        (tiny.deepspec_config(), deepspec_tensors('gated'), ["markov_head_type='vanilla'", 'gated head']),
        (tiny.deepspec_config(markov_rank=5), deepspec_tensors(), ['markov_rank=5', 'says 3']),
        (
            tiny.deepspec_config(confidence_head_with_markov=False),
            deepspec_tensors(),
            ['confidence_head_with_markov=False', 'says True'],
        ),
        (
            tiny.deepspec_config(enable_confidence_head=False),
            deepspec_tensors(),
            ['confidence_head.proj.bias', 'no use for'],
        ),
    ],
)
def test_a_config_that_contradicts_its_file(tmp_path, config, tensors, words):
    refused(tmp_path, config, *words, tensors=tensors)


@pytest.mark.parametrize(
    ('config', 'target', 'words'),
    [
        ({}, {'hidden_size': 32}, ['hidden_size=16', 'has 32']),
        ({}, {'vocab_size': 60}, ['vocab_size=50', 'has 60']),
        ({}, {'num_hidden_layers': 7, 'layer_types': None}, ['num_target_layers=6', 'has 7']),
        ({'num_target_layers': None}, {'num_hidden_layers': 3, 'layer_types': None}, ['target_layer_ids=3', '0 to 2']),
    ],
)
def test_a_draft_made_for_another_target(tmp_path, config, target, words):
    other = read_target(tiny.write(tmp_path / 'target', tiny.target_config(**target)))
    refused(tmp_path / 'draft', tiny.zlab_config(**config), *words, target=other)


# --- golden cases

GOLDEN = Path(os.environ.get('SPECDEC_GOLDEN', 'no such folder'))


def golden_cases() -> list[Path]:
    cases = sorted(path.parent for path in GOLDEN.glob('*/config.json') if path.parent.name != 'target')
    return cases + sorted(path.parent for path in GOLDEN.glob('refused/*/config.json'))


@pytest.mark.golden
@pytest.mark.skipif(not GOLDEN.is_dir(), reason='SPECDEC_GOLDEN is not set')
@pytest.mark.parametrize('case', golden_cases(), ids=lambda path: path.name)
def test_golden(case):
    target = read_target(GOLDEN / 'target')
    if case.parent.name == 'refused':
        with pytest.raises(CheckpointError):
            read_draft(case, target)
        return
    try:
        config = read_draft(case, target)
    except CheckpointError as error:
        if 'DFlash 2' in str(error):
            pytest.skip(str(error))
        raise
    with safe_open(case / 'expected.safetensors', framework='pt') as expected:
        assert expected.get_slice('proposal').get_shape() == [config.num_proposals]
        assert expected.get_slice('block_ids').get_shape() == [config.block_rows]
        assert expected.get_tensor('block_ids')[1:].eq(config.mask_id).all()
        assert ('chain_logits' in expected.keys()) == (config.kind == 'dspark')  # noqa: SIM118 - not a mapping
