"""Many clients at once, for minutes: every stream is its offline result, nothing is lost, memory stays as it is."""

import asyncio
import contextlib
import json
import random
import socket
import statistics
import time
from urllib.parse import urlsplit

import pytest

from benchmark.profile_restful_api import Client, Outcome, ask
from specdec import GenerationConfig, PytorchEngineConfig, SpeculativeConfig, pipeline
from specdec.demo.prompts import held_out_prompts
from tests.helpers.servers import ServerProcess

NUM_CLIENTS = 64
MINUTE = 60.0
LENGTHS = (1, 7, 24, 48, 96)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


@pytest.fixture(scope='module')
def server():
    with ServerProcess.demo('--max-batch-size', '32', '--cache-block-seq-len', '16') as server:
        yield server


@pytest.fixture(scope='module')
def cases() -> list[tuple[str, int, str]]:
    """(prompt, number of tokens, the text that the Python interface gives)"""
    prompts = [prompt.text for prompt in held_out_prompts()][:24]
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(len(prompts))]
    configs = [GenerationConfig(max_new_tokens=length, ignore_eos=True) for length in lengths]
    with pipeline('demo', PytorchEngineConfig(), speculative_config=SpeculativeConfig('dspark')) as pipe:
        answers = pipe(prompts, configs)
    return [(prompt, length, answer.text) for prompt, length, answer in zip(prompts, lengths, answers)]


def body_of(case: tuple[str, int, str], **more: object) -> dict[str, object]:
    prompt, length, _ = case
    return {
        'model': 'demo', 'messages': [{'role': 'user', 'content': prompt}], 'max_tokens': length, 'temperature': 0,
        'ignore_eos': True, 'stream': True, 'stream_options': {'include_usage': True}, **more,
    }  # fmt: skip


def complaint(case: tuple[str, int, str], outcome: Outcome) -> str | None:
    _, length, text = case
    if outcome.error is not None:
        return outcome.error
    if outcome.text != text:
        return f'expected {text!r}, got {outcome.text!r}'
    if outcome.completion_tokens != length:
        return f'expected {length} tokens, got {outcome.completion_tokens}'
    return None


def test_64_clients_for_two_minutes(server, cases, capsys):
    """No error, no token lost or doubled; memory of the second minute within 5 % of the first's; a cheap server."""
    client = Client(server.url)
    complaints: list[str] = []
    counts = {'requests': 0, 'tokens': 0, 'chunks': 0}
    memory: list[tuple[float, int]] = []

    async def one(number: int, deadline: float) -> None:
        rng = random.Random(number)
        while time.monotonic() < deadline:
            case = rng.choice(cases)
            outcome = await ask(client, body_of(case), 0.0)
            if (problem := complaint(case, outcome)) is not None:
                complaints.append(problem)
            counts['requests'] += 1
            counts['tokens'] += outcome.completion_tokens
            counts['chunks'] += len(outcome.arrivals)

    async def watch(begin: float, deadline: float) -> None:
        while time.monotonic() < deadline:
            memory.append((time.monotonic() - begin, server.rss()))
            await asyncio.sleep(1)

    async def run() -> None:
        await asyncio.gather(*(ask(client, body_of(case), 0.0) for case in cases))  # everything is warm
        begin = time.monotonic()
        before = server.cpu_seconds()
        deadline = begin + 2 * MINUTE
        await asyncio.gather(*(one(number, deadline) for number in range(NUM_CLIENTS)), watch(begin, deadline))
        counts['server'], counts['engine'] = (b - a for a, b in zip(before, server.cpu_seconds()))

    asyncio.run(run())
    first, second = (
        statistics.mean(size for when, size in memory if low <= when < low + MINUTE) for low in (0.0, MINUTE)
    )
    share = counts['server'] / counts['engine']
    with capsys.disabled():
        print(
            f'\n{counts["requests"]} requests, {counts["tokens"]} tokens, {counts["chunks"]} chunks; RSS '
            f'{first / 2**20:.0f} -> {second / 2**20:.0f} MiB; server {1e6 * counts["server"] / counts["tokens"]:.0f} '
            f'us per token, {1e6 * counts["server"] / counts["chunks"]:.0f} us per chunk, {share:.1%} of the engine'
        )
    assert not complaints, complaints[:3]
    assert counts['requests'] > NUM_CLIENTS
    assert abs(second - first) <= 0.05 * first
    assert share <= 0.10
    server.wait_until_idle()


def test_random_aborts_and_disconnects(server, cases):
    """Who leaves takes nothing along: pages and slots return, and the others' texts are what they were."""
    client = Client(server.url)
    rng = random.Random(1)
    complaints: list[str] = []

    async def stays(case: tuple[str, int, str]) -> None:
        if (problem := complaint(case, await ask(client, body_of(case), 0.0))) is not None:
            complaints.append(problem)

    async def leaves(case: tuple[str, int, str], after: int) -> None:
        stream = client.stream('/v1/chat/completions', body_of(case, max_tokens=500))
        async with contextlib.aclosing(stream):
            for _ in range(after):
                await anext(stream)

    async def leaves_while_waiting(case: tuple[str, int, str], seconds: float) -> None:
        body = body_of(case, max_tokens=500, stream=False)
        del body['stream_options']
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.post('/v1/chat/completions', body), seconds)

    async def one(number: int) -> None:
        for _ in range(4):
            case = rng.choice(cases)
            kind = rng.randrange(3) if number % 2 else 0
            if kind == 0:
                await stays(case)
            elif kind == 1:
                await leaves(case, rng.randint(1, 5))
            else:
                await leaves_while_waiting(case, rng.uniform(0.01, 0.5))

    async def run() -> None:
        await asyncio.gather(*(one(number) for number in range(40)))

    asyncio.run(run())
    assert not complaints, complaints[:3]
    server.wait_until_idle()
    metrics = server.metrics()
    assert metrics['request_success_total{finished_reason="abort"}'] > 10
    emitted = metrics['prefill_first_tokens_total'] + metrics['decode_steps_total']
    assert metrics['generation_tokens_total'] == emitted + metrics['spec_decode_num_accepted_tokens_total']


def test_clients_that_never_read_cost_a_bounded_amount(echo_tokenizer):
    """Their text waits in one piece; when they leave, it goes, and meanwhile everybody else is served."""
    body = {'model': 'echo', 'prompt': '!endless', 'max_tokens': 50_000, 'stream': True}
    data = json.dumps(body).encode()
    head = 'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n'
    head += f'Content-Length: {len(data)}\r\n\r\n'
    with ServerProcess.echo(echo_tokenizer, max_batch_size=64) as server:
        address = urlsplit(server.url)
        before = server.rss()
        connections = [socket.create_connection((address.hostname, address.port)) for _ in range(40)]
        for connection in connections:
            connection.sendall(head.encode() + data)
        sizes = []
        for _ in range(15):
            time.sleep(1)
            sizes.append(server.rss() - before)
            assert server.metrics()['engine_up'] == 1
        for connection in connections:
            connection.close()
        server.wait_until_idle()
    assert max(sizes) < 120 * 2**20, [size >> 20 for size in sizes]
