"""What the plug-in changes in LMDeploy, and when it changes nothing."""

import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path

import lmdeploy.version
import pytest
from lmdeploy.messages import SpeculativeConfig as HostSpeculativeConfig
from lmdeploy.pytorch.config import ModelConfig
from lmdeploy.pytorch.engine.config_builder import ConfigBuilder
from lmdeploy.pytorch.spec_decode.proposers.base import SPEC_PROPOSERS

from specdec.errors import CheckpointError, ConfigError
from specdec.integrations.lmdeploy import SpeculativeConfig, install, installed, patches
from specdec.integrations.lmdeploy.configs import DraftingConfig, check_draft
from specdec.models.checkpoint import read_draft
from tests.integrations.lmdeploy.host import Host


def test_install_is_idempotent() -> None:
    before = [patch.current() for patch in patches.PATCHES]
    assert installed()
    assert install()
    assert [patch.current() for patch in patches.PATCHES] == before


@pytest.mark.parametrize('patch', patches.PATCHES + patches.CLI_PATCHES, ids=lambda patch: patch.symbol)
def test_every_patch_knows_what_it_replaces(patch: patches.Patch) -> None:
    current = patch.current()
    original = vars(current).get(patches.MARK, current)
    assert patches.source_digest(original) == patch.digest
    assert patch.why


def test_another_version_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(lmdeploy.version, '__version__', '0.19.0')
    with caplog.at_level(logging.WARNING, 'specdec'):
        assert not install()
    assert 'its version is 0.19.0, the plug-in is for 0.18' in caplog.text


def test_an_engine_with_dspark_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(SPEC_PROPOSERS.module_dict, 'dspark', object)
    with caplog.at_level(logging.WARNING, 'specdec'):
        assert not install()
    assert 'it has method dspark itself' in caplog.text


def test_changed_sources_are_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def build_specdecode_config() -> None:
        """Not what the patch was made for."""

    monkeypatch.setattr(ConfigBuilder, 'build_specdecode_config', staticmethod(build_specdecode_config))
    with caplog.at_level(logging.WARNING, 'specdec'):
        assert not install()
    assert 'ConfigBuilder.build_specdecode_config is not as in LMDeploy 0.18.0' in caplog.text
    assert ConfigBuilder.build_specdecode_config is build_specdecode_config


def test_unpickling_a_config_installs_the_plug_in(host: Host) -> None:
    """What a spawned engine, and a worker, are sent."""
    config = SpeculativeConfig('dspark', str(host.draft_folder('demo', 'dspark')))
    draft = read_draft(Path(config.model))
    for sent in (config, DraftingConfig('there', 'dflash', draft=draft)):
        code = (
            'import pickle, sys; found = pickle.load(sys.stdin.buffer)\n'
            'from specdec.integrations.lmdeploy.patches import installed\n'
            'print(installed(), found.num_speculative_tokens)'
        )
        done = subprocess.run([sys.executable, '-c', code], input=pickle.dumps(sent), capture_output=True, check=True)
        assert done.stdout.decode().split()[-2:] == ['True', str(sent.num_speculative_tokens)]


def test_tokens_are_as_trained_unless_told(host: Host) -> None:
    folder = str(host.draft_folder('demo', 'dspark'))
    assert SpeculativeConfig('dspark', folder).num_speculative_tokens == 7
    assert SpeculativeConfig('dspark', folder, 3).num_speculative_tokens == 3
    assert SpeculativeConfig('dflash', str(host.draft_folder('demo', 'dflash'))).num_speculative_tokens == 7
    assert SpeculativeConfig('dflash', 'somewhere', dflash_block_size=4).num_speculative_tokens == 3
    assert SpeculativeConfig('eagle3', 'somewhere').num_speculative_tokens == 1


def test_bad_configs_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match='stock'):
        SpeculativeConfig('dflash', 'somewhere', 3, stock=('everything',))
    with pytest.raises(ConfigError, match='stock'):
        SpeculativeConfig('dspark', 'somewhere', 3, stock=('draft',))
    with pytest.raises(ValueError, match='dflash_block_size'):
        SpeculativeConfig('dspark', 'somewhere', dflash_block_size=4)


@pytest.mark.parametrize(
    ('method', 'draft', 'tokens', 'settings', 'match'),
    [
        ('dflash', 'dspark', None, {}, "method='dflash'.*use 'dspark'"),
        ('dspark', 'dspark', 8, {}, 'num_speculative_tokens=8: this draft proposes 1 to 7'),
        ('dspark', 'dspark', None, {'quant_policy': 8}, 'quant_policy'),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    host: Host, method: str, draft: str, tokens: int | None, settings: dict[str, int], match: str
) -> None:
    folder = str(host.draft_folder('demo', draft))
    config = SpeculativeConfig(method, folder, tokens or 7)
    with pytest.raises(ConfigError, match=match):
        host.pipeline('demo', config, **settings)


def test_a_draft_of_another_target_is_refused(host: Host) -> None:
    config = SpeculativeConfig('dspark', str(host.draft_folder('demo', 'dspark')))
    with pytest.raises(CheckpointError, match='choose the draft made for'):
        host.pipeline('dense', config)


def test_targets_without_taps_are_refused(host: Host, tmp_path: Path) -> None:
    """By name, where LMDeploy's class hands out nothing, or not the embedding."""
    draft = host.draft_folder('dense', 'dspark_vanilla')
    config = SpeculativeConfig('dspark', str(draft))
    settings = json.loads((host.target_folder('dense') / 'config.json').read_text())
    for architecture, match in (
        ('Qwen2ForCausalLM', 'architectures'),
        ('Qwen3_5ForConditionalGeneration', 'target_layer_ids=-1'),
    ):
        (tmp_path / 'config.json').write_text(json.dumps({**settings, 'architectures': [architecture]}))
        target = ModelConfig.from_pretrained(str(tmp_path))
        with pytest.raises(ConfigError, match=match):
            check_draft(read_draft(draft), target, config, draft)


def test_lmdeploys_own_config_drafts_too(host: Host) -> None:
    config = HostSpeculativeConfig('dspark', str(host.draft_folder('demo', 'dspark')), 3)
    with host.pipeline('demo', config) as served:
        assert type(served.proposer).__name__ == 'HostProposer'
        assert served.proposer.num_speculative_tokens == 3


def test_the_table_is_all() -> None:
    """Importing the plug-in changes what PATCHES and TARGETS name, and nothing else."""
    code = (
        'import sys, json, importlib\n'
        'import lmdeploy.pytorch.engine.engine, lmdeploy.pytorch.spec_decode.spec_agent, lmdeploy.cli.serve\n'
        'def everything():\n'
        '    for name, module in sorted(sys.modules.items()):\n'
        "        if name.split('.')[0] != 'lmdeploy' or module is None: continue\n"
        '        for key, value in list(vars(module).items()):\n'
        "            if key.startswith('__'): continue\n"
        "            yield f'{name}.{key}', id(value)\n"
        '            if isinstance(value, type) and value.__module__ == name:\n'
        "                yield from ((f'{name}.{key}.{k}', id(v)) for k, v in list(vars(value).items())\n"
        "                            if not k.startswith('__') and k != '_abc_impl')\n"
        'before = dict(everything())\n'
        'import specdec.integrations.lmdeploy\n'
        'after = dict(everything())\n'
        'print(json.dumps([k for k in before if after.get(k) != before[k]]))\n'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, check=True, text=True)
    assert set(json.loads(done.stdout.splitlines()[-1])) == {patch.symbol for patch in patches.PATCHES}
