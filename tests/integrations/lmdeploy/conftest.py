"""These tests run LMDeploy itself on a CPU, in an environment that .ci/run makes for it; elsewhere they are skipped."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

AVAILABLE = importlib.util.find_spec('lmdeploy') is not None and not torch.cuda.is_available()

if AVAILABLE:
    import tests.integrations.lmdeploy.cpu_host  # noqa: F401 - before anything of LMDeploy's
else:
    collect_ignore_glob = ['test_*.py']


@pytest.fixture(scope='session', autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope='session')
def host(tmp_path_factory: pytest.TempPathFactory) -> 'Iterator[object]':
    from tests.integrations.lmdeploy.host import Host

    host = Host(Path(tmp_path_factory.mktemp('models')))
    yield host
    host.close()
