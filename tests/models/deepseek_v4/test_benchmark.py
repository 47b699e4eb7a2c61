"""The benchmark of a GPU's step runs; what it measures is not judged here."""

import json
from pathlib import Path

import pytest

from benchmark import bench_deepseek_v4


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shape = ['--tiny', '--device', 'cpu', '--layers', '4', '--experts', '8']
    run = ['--batch', '2', '--context', '140', '--steps', '3', '--json', str(tmp_path / 'out.json')]
    monkeypatch.setattr('sys.argv', ['bench_deepseek_v4', *shape, *run])
    bench_deepseek_v4.main()
    plain, drafted = json.loads((tmp_path / 'out.json').read_text())['rows']
    assert (plain['method'], drafted['method']) == ('plain', 'dspark5')
    assert drafted['bytes'] > plain['bytes'] > 0
