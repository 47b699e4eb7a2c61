import json

import pytest
import yaml

from specdec import ConfigError
from specdec.cli import check_env as module
from specdec.version import __version__


def test_report_is_printed_and_written(tmp_path, capsys):
    for file, read in ((tmp_path / 'env.json', json.loads), (tmp_path / 'env.yml', yaml.safe_load)):
        module.check_env(file)
        report = read(file.read_text())
        assert report['specdec'].startswith(__version__)
        assert report['PyTorch CUDA']
        assert f'platform: {report["platform"]}\n' in capsys.readouterr().out


def test_other_distribution_of_the_same_name_is_told(monkeypatch, capsys):
    monkeypatch.setattr(module, 'environment', dict)
    monkeypatch.setattr(module, 'version_of', lambda _: '0.0.1')
    module.check_env()
    assert 'another project' in capsys.readouterr().err


def test_missing_things_are_named(tmp_path):
    assert module.version_of('no-such-distribution') == module.NOT_FOUND
    assert module._output('no-such-tool') == module.NOT_FOUND
    assert module._output('false') == module.NOT_FOUND
    with pytest.raises(ConfigError, match='dump_file'):
        module.check_env(tmp_path / 'env.pkl')
    with pytest.raises(ConfigError, match='cannot be written'):
        module.write_report({}, tmp_path / 'none' / 'env.json')
