"""Bodies that nobody meant: by the server's own schema, broken, huge, deep. Never a 5xx, never a hang."""

import contextlib
import json
import random
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.helpers.servers import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]
SECONDS = 30  # an answer that takes longer counts as a hang
PATHS = ('/v1/chat/completions', '/v1/completions', '/generate', '/v1/encode', '/abort_request')


@pytest.fixture(scope='module')
def server():
    with ServerProcess.demo('--max-batch-size', '8', '--enable-abort-handling', '--session-len', '128') as server:
        yield server


def check(response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()['error']) == {'message', 'type', 'param', 'code'}


@pytest.mark.parametrize('path', PATHS)
def test_bodies_by_the_schema(server, path):
    """schemathesis makes bodies that fit the OpenAPI document, and some that do not."""
    schema = schemathesis.openapi.from_url(f'{server.url}/openapi.json')
    operation = schema[path]['POST']
    strategy = st.one_of(
        operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE),
        operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE),
    )

    @settings(
        max_examples=150,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def send(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):  # some that get past the name, and end soon
            for name, value in (('model', 'demo'), ('max_tokens', 4), ('ignore_eos', None)):
                if name in case.body:
                    case.body[name] = value
        response = case.call(timeout=SECONDS)
        assert response.status_code < 500, (case.body, response.text)

    send()
    server.wait_until_idle()


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**400, 0.5, -0.5, 1e308, '', 'x', 'x' * 100_000, '\x00',
    '\ud800', '你好😀', [], [0], [[]], [None], ['x'] * 1000, {}, {'a': {}}, {'type': 'text'}, {'type': 'json_object'},
]  # fmt: skip


def test_each_field_with_every_kind_of_value(server):
    schemas = httpx.get(f'{server.url}/openapi.json').json()['components']['schemas']
    base = {
        'ChatRequest': {'model': 'demo', 'messages': [{'role': 'user', 'content': 'x'}], 'max_tokens': 2},
        'CompletionRequest': {'model': 'demo', 'prompt': 'x', 'max_tokens': 2},
        'GenerateRequest': {'prompt': 'x', 'max_tokens': 2},
        'EncodeRequest': {'input': 'x'},
        'AbortRequest': {'session_id': 1},
    }
    with httpx.Client(timeout=SECONDS) as client:
        for path, (name, body) in zip(PATHS, base.items()):
            for field in schemas[name]['properties']:
                for value in VALUES:
                    data = json.dumps(body | {field: value}).encode()
                    check(client.post(server.url + path, content=data, headers={'Content-Type': 'application/json'}))
    server.wait_until_idle()


def test_messages_of_every_shape(server):
    rng = random.Random(0)

    def value(depth: int) -> Any:
        kind = rng.randrange(6 if depth else 4)
        if kind < 4:
            return rng.choice(VALUES[:20])
        if kind == 4:
            return [value(depth - 1) for _ in range(rng.randint(0, 3))]
        names = ('role', 'content', 'type', 'text', 'tool_calls', 'function', 'arguments', 'name', 'image_url')
        return {rng.choice(names): value(depth - 1) for _ in range(rng.randint(0, 4))}

    with httpx.Client(timeout=SECONDS) as client:
        for _ in range(400):
            messages = [{'role': rng.choice(('user', 'assistant', 'tool', value(1))), 'content': value(3)}]
            messages += [{'role': 'assistant', **value_of_message(value)} for _ in range(rng.randint(0, 1))]
            kwargs = {'a': value(2)} if rng.random() < 0.1 else {}  # the template reads none
            body = {'model': 'demo', 'messages': messages, 'max_tokens': 1, 'chat_template_kwargs': kwargs}
            data = json.dumps(body).encode()
            url = server.url + PATHS[0]
            check(client.post(url, content=data, headers={'Content-Type': 'application/json'}))


def value_of_message(value: Any) -> dict[str, Any]:
    return {'tool_calls': value(3), 'content': value(1)}


def test_bytes_that_are_no_bodies(server):
    rng = random.Random(0)
    good = b'{"model": "demo", "prompt": "def f():", "max_tokens": 2, "stop": ["a", "b"], "logprobs": 2}'
    with httpx.Client(timeout=SECONDS) as client:
        for number in range(400):
            data = bytearray(good)
            for _ in range(rng.randint(1, 4)):
                place = rng.randrange(len(data))
                data[place : place + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
            if number % 10 == 0:
                data = bytearray(b'{"model":' + rng.choice((b'[', b'{"a":', b'"')) * rng.randint(1, 200_000))
            response = client.post(
                server.url + PATHS[1], content=bytes(data), headers={'Content-Type': 'application/json'}
            )
            check(response)


def test_bytes_that_are_no_http(server):
    address = urlsplit(server.url)
    rng = random.Random(0)
    for _ in range(50):
        with socket.create_connection((address.hostname, address.port), timeout=SECONDS) as connection:
            connection.sendall(
                rng.choice((b'', b'GET ', b'POST /generate HTTP/1.1\r\n')) + rng.randbytes(300) + b'\r\n\r\n'
            )
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
    assert httpx.get(f'{server.url}/health').status_code == 200
