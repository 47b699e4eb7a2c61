"""From start to end: what is said at the start, what SIGTERM does, and what is told of a dead engine."""

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import psutil
import pytest

from tests.helpers.servers import ROOT, ServerProcess, disconnecting_stream
from tests.helpers.tokenizers import CHAT_TEMPLATE

ENDLESS = {'model': 'echo', 'prompt': '!endless', 'max_tokens': 50_000, 'stream': True}


def test_start_says_what_was_loaded(demo_server):
    log = demo_server.log
    for line in ('specdec ', 'target: ', 'draft: dspark', 'memory: ', 'limits: session_len 1024, max_batch_size 8'):
        assert line in log
    assert 'pages of 16 tokens' in log
    assert f'serving demo at {demo_server.url}' in log


def finished(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, '-m', 'specdec.cli.main', 'serve', 'api_server', *arguments]
    settings = os.environ | environment
    return subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ('flags', 'error'),
    [
        (('--backend', 'turbomind'), "backend='turbomind'"),
        (('--tp', '3'), 'tp=3'),
        (('--dp', '2'), 'dp=2: not served here; leave it at 1'),
        (('--proxy-url', 'http://x'), "proxy_url='http://x'"),
        (('--allow-terminate-by-client',), 'allow_terminate_by_client=True'),
        (('--server-port', '99999'), 'server_port=99999'),
        (('--server-name', 'no.such.host.invalid'), "server_name='no.such.host.invalid'"),
        (('--max-concurrent-requests', '0'), 'max_concurrent_requests=0'),
        (('--tool-call-parser', 'llama3'), "tool_call_parser='llama3'"),
        (('--reasoning-parser', 'x'), "reasoning_parser='x'"),
        (('--log-level', 'LOUD'), "log_level='LOUD'"),
        (('--ssl',), 'ssl=True: needs SSL_KEYFILE'),
        (('--logprobs-mode', 'raw_logits'), "logprobs_mode='raw_logits'"),
        (('--speculative-draft-model', 'x'), "speculative_draft_model='x'"),
    ],
    ids=lambda value: ' '.join(value) if isinstance(value, tuple) else None,
)
def test_bad_flags_are_one_line(capsys, flags, error):
    from specdec.cli.main import main

    with pytest.raises(SystemExit) as raised:
        main(['serve', 'api_server', 'demo', *flags])
    captured = capsys.readouterr()
    assert raised.value.code == 1
    assert captured.err.startswith(f'error: {error}')
    assert captured.err.count('\n') == 1


def test_a_port_that_is_taken_and_a_model_that_is_not_there():
    with socket.create_server(('127.0.0.1', 0)) as listener:
        port = str(listener.getsockname()[1])
        result = finished('demo', '--server-name', '127.0.0.1', '--server-port', port)
    assert (result.returncode, result.stderr.count('\n')) == (1, 1)
    assert f'server_port={port}: cannot be had' in result.stderr
    result = finished('/no/such/model', '--server-port', '0')
    assert (result.returncode, result.stderr) == (1, "error: model='/no/such/model': no such folder; check the path\n")
    assert finished('demo', '--no-such-flag').returncode == 2


def test_sigterm_lets_requests_end(echo_tokenizer):
    """They end by themselves; who comes later is not let in."""
    with ServerProcess.echo(echo_tokenizer) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        text = '!slow' + ' the quick brown fox' * 10
        body = {'model': 'echo', 'prompt': text, 'max_tokens': 500, 'num_speculative_tokens': 0}
        running = pool.submit(httpx.post, f'{server.url}/v1/completions', json=body, timeout=60)
        server.wait_for(lambda: server.metrics()['num_requests_running'] == 1)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.4)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f'{server.url}/health')
        assert running.result().json()['choices'][0]['text'] == text
        assert server.process.wait(30) == 0


@pytest.mark.parametrize('number', [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_requests_that_do_not_end_are_aborted_in_time(echo_tokenizer, number):
    with ServerProcess.echo(echo_tokenizer, shutdown_seconds=1.0) as server:
        engine = server.engine
        with disconnecting_stream(f'{server.url}/v1/completions', ENDLESS) as lines:
            next(lines)
            begin = time.monotonic()
            os.killpg(server.process.pid, number)  # as a terminal or a service manager does: the engine gets it too
            rest = [line for line in lines if line]
        assert rest[-1] == 'data: [DONE]'
        assert json.loads(rest[-2].removeprefix('data: '))['choices'][0]['finish_reason'] == 'abort'
        assert server.process.wait(30) == 0
        assert time.monotonic() - begin < 20
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
        assert 'Traceback' not in server.log


@pytest.mark.parametrize('command', ['!crash', pytest.param('SIGKILL', marks=pytest.mark.slow)])
def test_a_dead_engine_is_reported(echo_tokenizer, command):
    with ServerProcess.echo(echo_tokenizer) as server:
        cause = 'killed by SIGKILL' if command == 'SIGKILL' else 'RuntimeError: the device is on fire'
        with disconnecting_stream(f'{server.url}/v1/completions', ENDLESS) as lines:
            next(lines)
            if command == 'SIGKILL':
                server.engine.kill()
            else:
                body = {'model': 'echo', 'prompt': command}
                response = httpx.post(f'{server.url}/v1/completions', json=body, timeout=30)
                assert response.status_code == 500
                assert cause in response.json()['error']['message']
            rest = [line for line in lines if line]
        assert rest[-1] == 'data: [DONE]'
        error = json.loads(rest[-2].removeprefix('data: '))['error']
        assert (error['type'], error['code']) == ('server_error', 'engine_error')
        assert cause in error['message']
        server.wait_for(lambda: httpx.get(f'{server.url}/health').status_code == 503, 5)
        assert cause in httpx.get(f'{server.url}/health').json()['message']
        response = httpx.post(f'{server.url}/v1/completions', json={'model': 'echo', 'prompt': 'x'})
        assert (response.status_code, response.json()['error']['code']) == (503, 'engine_error')
        assert server.metrics()['engine_up'] == 0
        assert cause in server.log


@pytest.mark.slow
def test_no_engine_outlives_a_killed_server(echo_tokenizer):
    server = ServerProcess.echo(echo_tokenizer)
    engine = server.engine
    server.kill()
    server.wait_for(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 10)


@pytest.mark.slow
def test_every_flag_together(tmp_path):
    """LMDeploy's spelling: underscores, several values after one flag, files; and HTTPS."""
    key, certificate = tmp_path / 'key.pem', tmp_path / 'certificate.pem'
    subprocess.run(
        ['openssl', 'req', '-x509', '-newkey', 'rsa:2048', '-nodes', '-keyout', key, '-out', certificate,
         '-days', '2', '-subj', '/CN=localhost'],
        check=True, capture_output=True,
    )  # fmt: skip
    template = tmp_path / 'template.jinja'
    template.write_text(CHAT_TEMPLATE)
    flags = (
        '--tp', '1', '--session_len', '256', '--max-batch-size', '2', '--max-concurrent-requests', '5',
        '--cache-max-entry-count', '0.01', '--cache-block-seq-len', '8', '--max-prefill-token-num', '32',
        '--no-enable-prefix-caching', '--dtype', 'float32', '--chat-template', str(template),
        '--tool-call-parser', 'qwen3coder', '--reasoning-parser', 'deepseek-r1', '--generation-config', 'lmdeploy',
        '--logprobs-mode', 'raw_logprobs', '--enable-abort-handling', '--api_keys', 'a', 'b', '--ssl',
        '--allow-origins', 'https://x.example', '--max-log-len', '10', '--log-level', 'INFO', '--model-name', 'mine',
        '--eager-mode', '--num-gpu-blocks', '200', '--speculative-algorithm', 'dflash',
        '--speculative-dflash-block-size', '4', '--backend', 'pytorch', '--quant-policy', '0',
    )  # fmt: skip
    environment = {'SSL_KEYFILE': str(key), 'SSL_CERTFILE': str(certificate)}
    with ServerProcess.demo(*flags, **environment) as server:
        assert server.url.startswith('https://')
        with httpx.Client(verify=False, headers={'Authorization': 'Bearer b'}, timeout=60) as client:
            assert client.get(f'{server.url}/v1/models').json()['data'][0]['id'] == 'mine'
            body = {'model': 'mine', 'messages': [{'role': 'user', 'content': 'x'}], 'max_tokens': 4}
            answer = client.post(f'{server.url}/v1/chat/completions', json=body)
            assert answer.status_code == 200, answer.text
        assert 'num_draft_tokens' in httpx.get(f'{server.url}/page/chat.js', verify=False).text
        assert '200 pages' in server.log or '201 pages' in server.log
        assert 'prompt tokens' in server.log
