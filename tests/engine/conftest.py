from collections.abc import Iterator

import pytest
import torch

from tests.helpers.engines import World
from tests.helpers.exactness import Ledger


@pytest.fixture(scope='session', autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope='session')
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp('models'))


@pytest.fixture(scope='session')
def ledger() -> Iterator[Ledger]:
    ledger = Ledger()
    yield ledger
    ledger.close()
