import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from specdec.cli.inspect import inspect
from tests.helpers import checkpoints as tiny
from tests.helpers import deepseek_v4 as v4
from tests.helpers.hybrid import as_vision_model, random_hybrid, rewrite, stack_experts

app = typer.Typer()
app.command()(inspect)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def with_tokenizer(folder):
    (folder / 'tokenizer.json').write_text('{}')
    return folder


@pytest.fixture
def target(tmp_path):
    return with_tokenizer(tiny.write(tmp_path / 'target', tiny.target_config(), tiny.target_tensors(), shards=2))


@pytest.fixture
def draft(tmp_path):
    tensors = tiny.draft_tensors() | tiny.reduced_tensors() | tiny.markov_tensors('vanilla', tiny.REDUCED)
    config = tiny.speculators_dspark_config(draft_vocab_size=tiny.REDUCED, enable_confidence_head=False)
    return tiny.write(tmp_path / 'draft', config, tensors)


def test_a_target(target):
    result = run(target)
    assert result.exit_code == 0
    for words in ('kind: target, Qwen3ForCausalLM', '4 query, 2 key-value, of 8', 'tensors used: 69', 'missing: 0'):
        assert words in result.stdout


def test_a_target_without_a_tokenizer_or_weights(target):
    (target / 'tokenizer.json').unlink()
    result = run(target)
    assert result.exit_code == 1
    assert result.stderr == f"error: tokenizer='{target}': has no tokenizer.json; " + (
        'add it, and tokenizer_config.json, from where the model comes from\n'
    )
    (target / 'model.safetensors.index.json').unlink()
    result = run(target)
    assert 'add the weights, or name the folder that has them' in result.stderr


def test_a_draft_and_its_target(draft, target):
    result = run(draft, '--target', target)
    assert result.exit_code == 0, result.output
    for words in (
        'DSpark draft, Speculators dialect',
        'layer 1, layer 3 (counted from 0)',
        '5 rows, 4 proposals',
        'Markov head: vanilla, rank 3',
        'output vocabulary: 20 (reduced)',
        f'fits the target: yes, {target}',
        'tensors ignored: 1 (50 B): t2d',
    ):
        assert words in result.stdout


def test_json(draft, target):
    found = json.loads(run(draft, '--target', target, '--json').stdout)
    assert found['kind'] == 'dspark'
    assert found['served'] is True
    assert found['config']['taps'] == [1, 3]
    assert found['tensors']['ignored'] == ['t2d']
    assert found['tensors']['used']['count'] == 29
    assert json.loads(run(target, '--json').stdout)['kind'] == 'target'


def test_a_draft_for_another_target(draft, tmp_path):
    other = tiny.write(tmp_path / 'other', tiny.target_config(vocab_size=60))
    result = run(draft, '--target', other)
    assert result.exit_code == 1
    assert 'fits the target: no' in result.stdout
    assert result.stderr.startswith('error: vocab_size=50: the target has 60')
    assert result.stderr.count('\n') == 1


def test_a_file_that_does_not_match_its_config(tmp_path):
    tensors = tiny.draft_tensors() | {'surprise': torch.zeros(2)}
    del tensors['norm.weight']
    result = run(tiny.write(tmp_path, tiny.zlab_config(), tensors))
    assert result.exit_code == 1
    assert 'tensors missing: 1: norm.weight' in result.stdout
    assert 'tensors unexpected: 1 (8 B): surprise' in result.stdout
    assert result.stderr.startswith("error: tensors='norm.weight': missing")


@pytest.mark.parametrize(
    ('config', 'words'),
    [
        (tiny.zlab_config(architectures=['DFlash2DraftModel']), 'DFlash 2'),
        (tiny.target_config(architectures=['LlamaForCausalLM']), 'targets served here'),
    ],
)
def test_refusals_are_one_line(tmp_path, config, words):
    result = run(tiny.write(tmp_path, config), '--json')
    assert result.exit_code == 1
    assert result.stdout == ''
    assert words in result.stderr
    assert result.stderr.count('\n') == 1


def test_a_target_has_no_target(target):
    result = run(target, '--target', target)
    assert result.exit_code == 1
    assert 'goes with a draft' in result.stderr


def test_help():
    assert 'CHECKPOINT' in run('--help').stdout


def test_deepseek_v4_and_its_heads(tmp_path):
    tensors = v4.target_tensors(v4.build_target()) | v4.draft_tensors(v4.build_draft())
    result = run(with_tokenizer(v4.write(tmp_path / 'v4', v4.bundled_config(), v4.quantise(tensors))))
    assert result.exit_code == 0, result.output
    for words in (
        'kind: target, DeepseekV4ForCausalLM',
        'none in 2 layers, by 4 in 2 (6 entries chosen), by 128 in 2',
        'bundled draft: DSpark, 3 stages, 5 proposals, taps 3, 4, 5, Markov rank 8, with confidence head',
        f'tensors used: {len(tensors)}',
        'missing: 0',
        'unexpected: 0',
    ):
        assert words in result.stdout
    del tensors['layers.1.attn.indexer.wq_b.weight']
    result = run(v4.write(tmp_path / 'torn', v4.bundled_config(), tensors))
    assert result.exit_code == 1
    assert 'layers.1.attn.indexer.wq_b.weight' in result.stderr


def test_a_hybrid_with_a_vision_tower(tmp_path):
    random_hybrid('moe').save_pretrained(tmp_path)
    rewrite(tmp_path, as_vision_model)
    rewrite(tmp_path, stack_experts)
    result = run(with_tokenizer(tmp_path))
    assert result.exit_code == 0, result.output
    for words in (
        'kind: target, Qwen3_5MoeForConditionalGeneration',
        'attention: gated, in 1 layers; 50% of each head is rotated',
        'gated delta rule in 3 layers: 2 key heads of 8, 4 value heads of 16, convolution over 4 rows',
        'and a gated shared one of size 20, weights renormalised, in 4 layers',
        'model.visual.blocks.0.attn.qkv.weight',
        'missing: 0',
        'unexpected: 0',
    ):
        assert words in result.stdout
