"""The plug-in where LMDeploy starts processes: its API server's engine, and one worker per rank."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from specdec.demo.prompts import held_out_prompts
from tests.integrations.lmdeploy.host import Host, ask

PROGRAM = [sys.executable, '-m', 'tests.integrations.lmdeploy.on_cpu']
START = 120  # seconds that a server may take
# LMDeploy's parent may end the manager whose condition its engine process is still letting go: on a busy machine, a
# server may have to be started again.
LOST_RACE, ATTEMPTS = "_callmethod('release')", 4


@pytest.fixture(scope='module')
def server(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `specdec-lmdeploy serve api_server`, its engine in a process that LMDeploy spawns."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    command = [
        *PROGRAM, 'lmdeploy', 'serve', 'api_server', str(host.target_folder('demo')),
        '--speculative-algorithm', 'dspark',
        '--speculative-draft-model', str(host.draft_folder('demo', 'dspark')),
        '--server-name', '127.0.0.1', '--server-port', str(port), '--model-name', 'demo',
        '--session-len', '256', '--max-batch-size', '4', '--cache-max-entry-count', '0.05', '--eager-mode',
        '--enable-prefix-caching', '--log-level', 'WARNING',
    ]  # fmt: skip
    log = tmp_path_factory.mktemp('server') / 'log'
    for _ in range(ATTEMPTS):
        with log.open('wb') as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
            try:
                if _started(f'http://127.0.0.1:{port}/health', process):
                    yield f'http://127.0.0.1:{port}'
                    return
            finally:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
        if LOST_RACE not in log.read_text():
            break
    raise AssertionError(log.read_text()[-3000:])


def _started(url: str, process: subprocess.Popen[bytes]) -> bool:
    for _ in range(2 * START):
        if process.poll() is not None:
            return False
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except OSError:
            time.sleep(0.5)
    return False


def metrics(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f'{address}/metrics', timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    found = {}
    for line in lines:
        if match := re.fullmatch(r'lmdeploy:(\w+)\{([^}]*)\} (\S+)', line):
            position = re.search(r'position="(\d+)"', match[2])
            found[match[1] + (f'_{position[1]}' if position else '')] = float(match[3])
    return found


@pytest.mark.timeout(300)
def test_the_openai_client_and_the_metrics(host: Host, server: str) -> None:
    prompts = [prompt.text[:200] for prompt in held_out_prompts()[:4]]
    tokenizer = _tokenizer(host)
    plain = host.plain('demo', [ask(tokenizer(text)['input_ids'], max_new_tokens=30) for text in prompts])
    client = openai.OpenAI(base_url=f'{server}/v1', api_key='none')
    total, choices = 0, []
    for text in prompts:
        answer = client.completions.create(model='demo', prompt=text, max_tokens=30, temperature=0)
        choices.append(answer.choices[0].text)
        total += answer.usage.completion_tokens
    assert choices == [outcome.text for outcome in plain]

    pieces = client.chat.completions.create(
        model='demo', messages=[{'role': 'user', 'content': 'def f('}], max_tokens=20, seed=3, stream=True
    )
    streamed = ''.join(piece.choices[0].delta.content or '' for piece in pieces if piece.choices)
    whole = client.chat.completions.create(
        model='demo', messages=[{'role': 'user', 'content': 'def f('}], max_tokens=20, seed=3
    )
    assert streamed == whole.choices[0].message.content

    guided = client.chat.completions.create(
        model='demo',
        messages=[{'role': 'user', 'content': 'x = '}],
        max_tokens=40,
        extra_body={'response_format': {'type': 'regex_schema', 'regex_schema': r'[0-9]{4}-[0-9]{2}'}},
    )
    assert re.fullmatch(r'[0-9]{4}-[0-9]{2}', guided.choices[0].message.content)

    time.sleep(1)  # LMDeploy counts in the background
    counted = metrics(server)
    drafts, drafted = counted['spec_decode_num_drafts_total'], counted['spec_decode_num_draft_tokens_total']
    accepted = counted['spec_decode_num_accepted_tokens_total']
    by_position = [counted[f'spec_decode_num_accepted_tokens_per_pos_total_{n}'] for n in range(7)]
    assert drafted == 7 * drafts
    assert sum(by_position) == accepted
    assert by_position == sorted(by_position, reverse=True)
    assert 0.2 < accepted / drafts <= 7
    assert total > 0


def _tokenizer(host: Host) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(host.target_folder('demo'))


@pytest.mark.timeout(200)
def test_two_ranks(host: Host) -> None:
    """Target and draft sharded over two processes; the text is plain decoding's on one, the drafts are as good."""
    prompts = [ids[: 20 + 13 * n] for n, ids in enumerate(host.demo_prompts(4))]
    engine = {
        'session_len': 256, 'max_batch_size': 4, 'block_size': 16, 'num_gpu_blocks': 96, 'eager_mode': True,
        'max_prefill_token_num': 512, 'tp': 2, 'distributed_executor_backend': 'mp',
    }  # fmt: skip
    asked = {
        'target': str(host.target_folder('demo')),
        'draft': {'method': 'dspark', 'model': str(host.draft_folder('demo', 'dspark'))},
        'engine': engine,
        'prompts': prompts,
    }
    done = subprocess.run([*PROGRAM, 'pipeline', json.dumps(asked)], capture_output=True, text=True, check=True)
    texts, accepted = json.loads(done.stdout.splitlines()[-1])
    asks = [ask(ids, max_new_tokens=20) for ids in prompts]
    assert texts == [outcome.token_ids for outcome in host.plain('demo', asks)]
    with host.serve('demo', 'dspark') as served:
        served.run(asks)
    assert sorted(accepted) == sorted(served.accepted)
