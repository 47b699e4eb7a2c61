import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from specdec.errors import CheckpointError, ConfigError
from specdec.layers.parallel import SINGLE
from specdec.layers.rotary import RopeConfig
from specdec.models import checkpoint, hub
from specdec.models.checkpoint import (
    read_draft,
    read_generation_defaults,
    read_target,
    tensor_shapes,
    tensors,
)
from specdec.models.configs import GenerationDefaults
from specdec.models.qwen3 import Qwen3Target
from specdec.models.tensor_table import account, ignored_target, target_tensor_shapes
from tests.helpers import checkpoints as tiny

MOE = {
    'architectures': ['Qwen3MoeForCausalLM'],
    'model_type': 'qwen3_moe',
    'num_experts': 4,
    'num_experts_per_tok': 2,
    'moe_intermediate_size': 12,
    'norm_topk_prob': True,
    'layer_types': None,
}


def target_with(tmp_path, **changes):
    return read_target(tiny.write(tmp_path / 'target', tiny.target_config(**changes)))


def one_line(error: Exception) -> str:
    text = str(error)
    assert '\n' not in text
    return text


# --- targets


def test_a_dense_target(tmp_path):
    config = target_with(tmp_path)
    assert config.architecture == 'Qwen3ForCausalLM'
    assert config.decoder.num_layers == tiny.TARGET_LAYERS
    assert config.decoder.head_dim == tiny.HEAD_DIM
    assert config.decoder.rope == RopeConfig(theta=10000.0)
    assert config.windows == (None,) * tiny.TARGET_LAYERS
    assert config.dtype == 'float32'
    assert config.moe is None
    assert not config.tie_embeddings


@pytest.mark.parametrize(
    'layout',
    [
        {'rope_parameters': None, 'rope_theta': 5e5, 'rope_scaling': None},
        {'rope_parameters': None, 'rope_theta': 5e5, 'rope_scaling': {'type': 'default'}},
        {'rope_parameters': None, 'rope_scaling': {'rope_type': 'default', 'rope_theta': 500000}},
        {'rope_parameters': {'rope_theta': 5e5}, 'rope_theta': 5e5},
    ],
)
def test_every_place_for_theta(tmp_path, layout):
    assert target_with(tmp_path, **layout).decoder.rope == RopeConfig(theta=5e5)


@pytest.mark.parametrize('place', ['rope_scaling', 'rope_parameters'])
def test_yarn_in_both_layouts(tmp_path, place):
    yarn = {
        'rope_type': 'yarn',
        'factor': 4.0,
        'original_max_position_embeddings': 64,
        'rope_theta': 1e6,
        'beta_fast': None,
    }
    config = target_with(tmp_path, **{'rope_parameters': None, place: yarn})
    assert config.decoder.rope == RopeConfig(theta=1e6, kind='yarn', factor=4.0, original_max_position=64)
    assert config.decoder.max_position == 256


def test_yarn_without_its_original_length_extends_nothing(tmp_path):
    config = target_with(tmp_path, rope_parameters={'rope_type': 'yarn', 'factor': 2.0, 'rope_theta': 1e6})
    assert config.decoder.rope.original_max_position == config.decoder.max_position == 128


def test_linear_rope(tmp_path):
    config = target_with(tmp_path, rope_parameters={'rope_type': 'linear', 'factor': 2.0, 'rope_theta': 1e4})
    assert config.decoder.rope == RopeConfig(theta=1e4, kind='linear', factor=2.0)


@pytest.mark.parametrize(
    ('changes', 'windows'),
    [
        ({'use_sliding_window': False, 'sliding_window': 8}, [None] * 6),
        (
            {'use_sliding_window': True, 'sliding_window': 8, 'max_window_layers': 4, 'layer_types': None},
            [None] * 4 + [8] * 2,
        ),
        (
            {
                'use_sliding_window': True,
                'sliding_window': 8,
                'layer_types': ['sliding_attention', 'full_attention'] * 3,
            },
            [8, None] * 3,
        ),
        ({**MOE, 'use_sliding_window': True, 'sliding_window': 8, 'max_window_layers': 4}, [8] * 6),
    ],
)
def test_windows(tmp_path, changes, windows):
    assert list(target_with(tmp_path, **changes).windows) == windows


@pytest.mark.parametrize('key', ['num_experts', 'num_local_experts'])
def test_moe(tmp_path, key):
    changes = {**MOE, 'num_experts': None, key: 4, 'decoder_sparse_step': 2, 'mlp_only_layers': [3], 'head_dim': None}
    config = target_with(tmp_path, **changes)
    assert (config.moe.num_experts, config.moe.experts_per_token, config.moe.intermediate_size) == (4, 2, 12)
    assert config.moe.norm_topk
    assert config.moe.sparse_layers == (False, True, False, False, False, True)
    assert config.decoder.head_dim == tiny.HIDDEN // tiny.HEADS


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        ({'architectures': ['LlamaForCausalLM']}, ['LlamaForCausalLM', 'Qwen3ForCausalLM, Qwen3MoeForCausalLM']),
        ({'architectures': None}, ['architectures=None']),
        ({'rope_parameters': None}, ['rope_theta=None', 'missing']),
        ({'rope_theta': 5.0}, ['rope_theta=5.0', 'contradicts rope_parameters.rope_theta=10000.0']),
        ({'rope_parameters': {'rope_type': 'llama3', 'rope_theta': 1e4}}, ['rope_type', 'llama3', 'yarn']),
        ({'rope_parameters': {'full_attention': {'rope_theta': 1e4}}}, ['rope_parameters', 'per layer type']),
        ({'rope_scaling': {'type': 'yarn', 'factor': 4}}, ['rope_scaling', 'contradicts']),
        ({'partial_rotary_factor': 0.5}, ['partial_rotary_factor=0.5']),
        ({'hidden_size': None}, ['hidden_size=None', 'missing']),
        ({'hidden_size': '16'}, ["hidden_size='16'", 'integer']),
        ({'num_hidden_layers': True}, ['num_hidden_layers=True', 'integer']),
        ({'rms_norm_eps': -1.0}, ['rms_norm_eps=-1.0']),
        ({'num_key_value_heads': 3}, ['num_key_value_heads=3']),
        ({'head_dim': None}, ['head_dim=None', 'missing']),
        ({'hidden_act': 'gelu'}, ['hidden_act', 'silu']),
        ({'quantization_config': {'quant_method': 'fp8'}}, ["quantization_config='fp8'", 'unquantised']),
        ({'dtype': 'float64'}, ["dtype='float64'", 'bfloat16']),
        ({'layer_types': ['full_attention']}, ['layer_types', '6 entries']),
        ({'layer_types': ['sliding_attention'] * 6}, ['use_sliding_window']),
        ({**MOE, 'num_experts_per_tok': 9}, ['num_experts_per_tok=9', 'num_experts=4']),
        ({**MOE, 'num_experts': None}, ['num_experts=None', 'missing']),
    ],
)
def test_refused_targets_name_key_and_value(tmp_path, changes, words):
    with pytest.raises(CheckpointError) as caught:
        target_with(tmp_path, **changes)
    text = one_line(caught.value)
    for word in (*words, 'config.json'):
        assert word in text


def test_torch_dtype_and_no_dtype(tmp_path):
    assert target_with(tmp_path / 'old', dtype=None, torch_dtype='bfloat16').dtype == 'bfloat16'
    stored = {'x': torch.zeros(2, dtype=torch.float16), 'count': torch.zeros(1, dtype=torch.int64)}
    folder = tiny.write(tmp_path / 'new', tiny.target_config(dtype=None), stored)
    assert read_target(folder).dtype == 'float16'


@pytest.mark.parametrize('text', ['{"a": ', '[]', '\xff', '"x"'])
def test_broken_json(tmp_path, text):
    (tmp_path / 'config.json').write_bytes(text.encode('latin-1'))
    with pytest.raises(CheckpointError, match=r'config\.json') as caught:
        read_target(tmp_path)
    one_line(caught.value)


def test_missing_folder_and_missing_config(tmp_path):
    with pytest.raises(CheckpointError, match=r'nowhere.*not found'):
        read_target(tmp_path / 'nowhere')
    with pytest.raises(CheckpointError, match=r'config\.json.*not found'):
        read_target(tmp_path)


@pytest.mark.parametrize('changes', [{}, {'tie_word_embeddings': True}, {'attention_bias': True}, MOE])
def test_the_target_table_is_the_models_own(tmp_path, changes):
    config = target_with(tmp_path, **changes)
    model = Qwen3Target(config, (), 8, SINGLE, torch.float32, torch.device('cpu'))
    assert {name: place.shape for name, place in model.weights().items()} == target_tensor_shapes(config)


def test_a_tied_head_stored_again_is_noise(tmp_path):
    config = target_with(tmp_path, tie_word_embeddings=True)
    folder = tiny.write(tmp_path, tiny.target_config(), tiny.target_tensors())
    found = account(tensor_shapes(folder), target_tensor_shapes(config), ignored_target(config))
    assert set(found.ignored) == {'lm_head.weight'}
    found.check('here')


# --- generation defaults


def test_generation_defaults(tmp_path):
    folder = tiny.write(tmp_path, tiny.target_config())
    assert read_generation_defaults(folder) == GenerationDefaults(eos_ids=(48,))
    settings = {'eos_token_id': [48, 3], 'do_sample': True, 'temperature': 0.6, 'top_k': 20, 'top_p': 0.95, 'min_p': 0}
    (folder / 'generation_config.json').write_text(json.dumps(settings))
    assert read_generation_defaults(folder) == GenerationDefaults((48, 3), True, 0.6, 20, 0.95, 0)
    (folder / 'generation_config.json').write_text('{"temperature": "hot"}')
    with pytest.raises(CheckpointError, match="temperature='hot'"):
        read_generation_defaults(folder)


# --- tensors


@pytest.mark.parametrize('shards', [1, 3])
def test_tensors_come_whole_and_progress_adds_up(tmp_path, shards, monkeypatch):
    monkeypatch.setattr(checkpoint, 'MAPPED_BYTES', 64)
    stored = {f't{i}': torch.randn(i + 1, 3).to(torch.bfloat16) for i in range(7)}
    folder = tiny.write(tmp_path, tiny.target_config(), stored, shards)
    calls = []
    found = dict(tensors(folder, lambda done, total: calls.append((done, total))))
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)
    total = sum(tensor.nbytes for tensor in stored.values())
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    shapes = tensor_shapes(folder)
    assert shapes['t4'] == ((5, 3), 'BF16')
    assert sum(info.num_bytes for info in shapes.values()) == total


def sharded(tmp_path):
    return tiny.write(tmp_path, tiny.target_config(), {f't{i}': torch.ones(2) for i in range(4)}, shards=2)


def truncate(folder):
    path = folder / 'model-00002-of-00002.safetensors'
    path.write_bytes(path.read_bytes()[:-4])


def corrupt(folder):
    path = folder / 'model-00002-of-00002.safetensors'
    path.write_bytes(b'\x00' + path.read_bytes()[1:])


def lose_shard(folder):
    (folder / 'model-00002-of-00002.safetensors').unlink()


def pointer(folder):
    (folder / 'model-00002-of-00002.safetensors').write_text('version https://git-lfs.github.com/spec/v1\noid x\n')


def double(folder):
    save_file(
        {'t0': torch.ones(2), 't1': torch.ones(2), 't3': torch.ones(2)}, folder / 'model-00002-of-00002.safetensors'
    )


def edit_index(folder, name, shard):
    path = folder / 'model.safetensors.index.json'
    index = json.loads(path.read_text())
    index['weight_map'][name] = shard
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ('damage', 'words'),
    [
        (truncate, ['00002-of-00002', 'truncated or damaged']),
        (corrupt, ['00002-of-00002', 'truncated or damaged']),
        (lose_shard, ['00002-of-00002', 'not there']),
        (pointer, ['00002-of-00002', 'Git LFS']),
        (double, ['t0', '00002-of-00002', '00001-of-00002']),
        (lambda f: edit_index(f, 'ghost', 'model-00001-of-00002.safetensors'), ['ghost', '00001-of-00002']),
        (lambda f: edit_index(f, 't0', '../elsewhere.safetensors'), ['weight_map.t0', '../elsewhere']),
        (lambda f: (f / 'model.safetensors.index.json').write_text('{"weight_map": {}}'), ['weight_map', 'index.json']),
        (lambda f: (f / 'model.safetensors.index.json').write_text('{'), ['index.json', 'JSON']),
    ],
)
def test_damage_names_the_file(tmp_path, damage, words):
    folder = sharded(tmp_path)
    damage(folder)
    for read in (tensor_shapes, lambda f: next(tensors(f))):
        with pytest.raises(CheckpointError) as caught:
            read(folder)
        text = one_line(caught.value)
        assert all(word in text for word in words), text


def test_pickles_are_named_and_never_opened(tmp_path):
    folder = tiny.write(tmp_path, tiny.target_config())
    (folder / 'pytorch_model.bin').write_bytes(b'not even a pickle')
    with pytest.raises(CheckpointError, match=r'pytorch_model\.bin is a pickle'):
        tensor_shapes(folder)
    with pytest.raises(CheckpointError, match='neither'):
        tensor_shapes(tiny.write(tmp_path / 'bare', tiny.target_config()))


def test_a_mask_embedding_pickle_is_refused(tmp_path):
    folder = tiny.write(tmp_path, tiny.zlab_config(), tiny.draft_tensors())
    read_draft(folder)
    (folder / 'mask_embedding.pt').write_bytes(b'')
    with pytest.raises(CheckpointError, match=r'mask_embedding\.pt.*never loaded'):
        read_draft(folder)


# --- names and folders


def test_a_folder_is_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, '_fetch', lambda *_: pytest.fail('asked the hub'))
    assert hub.resolve_model(tmp_path) == tmp_path
    assert hub.resolve_model(str(tmp_path)) == tmp_path
    for missing in (str(tmp_path / 'gone'), './gone', 'a/b/c', ''):
        with pytest.raises(ConfigError, match='no such folder'):
            hub.resolve_model(missing)
    (tmp_path / 'file').write_text('')
    with pytest.raises(ConfigError, match='is a file'):
        hub.resolve_model(str(tmp_path / 'file'))


def test_a_name_is_fetched_without_code_or_pickles(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    repository = [
        'config.json', 'model-00001-of-00002.safetensors', 'tokenizer.json', 'merges.txt', 'chat_template.jinja',
        'modeling.py', 'pytorch_model.bin', 'mask_embedding.pt', 'README.md', 'original/model.safetensors',
    ]  # fmt: skip
    seen = {}

    def snapshot_download(name, **settings):
        seen.update(settings, name=name)
        rules = {key: settings[key] for key in ('allow_patterns', 'ignore_patterns')}
        seen['files'] = list(filter_repo_objects(repository, **rules))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot_download)
    assert hub.resolve_model('Qwen/Qwen3-8B', 'main', '/somewhere') == tmp_path
    assert (seen['name'], seen['revision'], seen['cache_dir']) == ('Qwen/Qwen3-8B', 'main', '/somewhere')
    assert seen['files'] == repository[:5]


def test_hub_failures_are_one_line(monkeypatch):
    import huggingface_hub
    from huggingface_hub import errors

    failures = {
        'offline': errors.OfflineModeIsEnabled('x\ny'),
        'not reachable': errors.LocalEntryNotFoundError('cannot find\nanything'),
        'TimeoutError: slow': TimeoutError('slow\nnetwork'),
    }
    for words, failure in failures.items():

        def fail(*_, failure=failure, **__):
            raise failure

        monkeypatch.setattr(huggingface_hub, 'snapshot_download', fail)
        with pytest.raises(ConfigError, match=words) as caught:
            hub.resolve_model('some/model')
        assert 'some/model' in one_line(caught.value)


def test_a_copied_folder_reads_the_same(tmp_path):
    folder = tiny.write(tmp_path / 'a', tiny.zlab_config(), tiny.draft_tensors())
    shutil.copytree(folder, tmp_path / 'b')
    assert read_draft(folder) == read_draft(tmp_path / 'b')
