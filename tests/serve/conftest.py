from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.echo_engine import echo_folder
from tests.helpers.servers import ServerProcess

KEY = 'sk-a secret'


@pytest.fixture(scope='session')
def echo_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return echo_folder(tmp_path_factory.mktemp('echo'))


@pytest.fixture(scope='session')
def demo_server() -> Iterator[ServerProcess]:
    """The demo model with its DSpark draft."""
    with ServerProcess.demo('--max-batch-size', '8', '--cache-block-seq-len', '16') as server:
        yield server


@pytest.fixture(scope='session')
def echo_server(echo_tokenizer: Path) -> Iterator[ServerProcess]:
    """Repeats prompts; reasoning and tool calls are taken apart, requests can be aborted."""
    settings = {'reasoning_parser': 'default', 'tool_call_parser': 'qwen', 'enable_abort_handling': True}
    with ServerProcess.echo(echo_tokenizer, session_len=60_000, **settings) as server:
        yield server


@pytest.fixture(scope='session')
def guarded_server(echo_tokenizer: Path) -> Iterator[ServerProcess]:
    """Wants a key, takes four requests at once, allows one origin, and takes no text apart."""
    settings = {'api_keys': ('other', KEY), 'max_concurrent_requests': 4, 'allow_origins': ('https://a.example',)}
    with ServerProcess.echo(echo_tokenizer, **settings) as server:
        yield server
