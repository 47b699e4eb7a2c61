"""Load against a running server: throughput and latency over concurrency, with the server's own figures beside them.

    python benchmark/profile_restful_api.py http://localhost:23333 --concurrency 1 4 16 --num-requests 64

Prompts are sent as chats, so token counts are those of the rendered chat template. Writes a table to the terminal, and
JSON, CSV and a PNG plot into a folder. The client is a few lines over asyncio's streams, so that it takes little of the
processor it measures.
"""

import argparse
import asyncio
import csv
import json
import random
import re
import ssl
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specdec.cli.prompts import read_prompts

PERCENTILES = (50, 90, 99)
SCRAPED = {  # counters whose growth during a round is reported
    'prompt_tokens_total': 'server_prompt_tokens',
    'cached_tokens_total': 'server_cached_tokens',
    'generation_tokens_total': 'server_generated_tokens',
    'decode_steps_total': 'server_decode_steps',
    'spec_decode_num_drafts_total': 'server_drafting_steps',
    'spec_decode_num_draft_tokens_total': 'server_drafted_tokens',
    'spec_decode_num_accepted_tokens_total': 'server_accepted_tokens',
    'num_preemptions_total': 'server_preemptions',
}


# ---------------------------------------------------------------------------------------------------------- client
class HttpError(Exception):
    """A status other than 200, with the body."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f'status {status}: {body[:300].decode(errors="replace")}')
        self.status, self.body = status, body


@dataclass(frozen=True, slots=True)
class Client:
    """Requests to one server, a connection each."""

    url: str
    api_key: str | None = None

    async def get(self, path: str) -> bytes:
        async with self._connection('GET', path, b'') as reader:
            return b''.join([part async for part in reader])

    async def post(self, path: str, body: dict[str, Any]) -> bytes:
        async with self._connection('POST', path, json.dumps(body).encode()) as reader:
            return b''.join([part async for part in reader])

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """The data of each event, [DONE] included."""
        held = b''
        async with self._connection('POST', path, json.dumps(body).encode()) as reader:
            async for part in reader:
                held += part
                *complete, held = held.split(b'\n\n')
                for one in complete:
                    yield one.removeprefix(b'data: ')

    @asynccontextmanager
    async def _connection(self, method: str, path: str, body: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
        """The parts of an answer's body; HttpError for a status other than 200. Leaving closes the connection."""
        address = urlsplit(self.url)
        secure = ssl.create_default_context() if address.scheme == 'https' else None
        port = address.port or (443 if secure else 80)
        reader, writer = await asyncio.open_connection(address.hostname, port, ssl=secure)
        try:
            head = [
                f'{method} {address.path.rstrip("/")}{path} HTTP/1.1',
                f'Host: {address.netloc}',
                'Connection: close',
            ]
            head += [f'Authorization: Bearer {self.api_key}'] if self.api_key else []
            head += ['Content-Type: application/json', f'Content-Length: {len(body)}'] if body else []
            writer.write('\r\n'.join([*head, '', '']).encode() + body)
            await writer.drain()
            status, headers = _status_and_headers(await reader.readuntil(b'\r\n\r\n'))
            parts = _chunked(reader) if headers.get('transfer-encoding') == 'chunked' else _plain(reader)
            if status != 200:
                raise HttpError(status, b''.join([part async for part in parts]))
            yield parts
        finally:
            writer.close()


def _status_and_headers(raw: bytes) -> tuple[int, dict[str, str]]:
    first, *rest = raw.decode('latin-1').split('\r\n')
    pairs = (line.partition(':') for line in rest if line)
    return int(first.split(' ')[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _chunked(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(b'\r\n'), 16):
        part = await reader.readexactly(size + 2)
        yield part[:-2]


async def _plain(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(65536):
        yield part


# --------------------------------------------------------------------------------------------------------- requests
@dataclass(slots=True)
class Outcome:
    """One request: seconds since the round began, `arrivals` of its chunks with text."""

    begin: float
    end: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    text: str = ''
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None


async def ask(client: Client, body: dict[str, Any], origin: float) -> Outcome:
    """Streams one chat completion. Never raises for what the server or the network does."""
    outcome = Outcome(time.perf_counter() - origin)
    try:
        async for data in client.stream('/v1/chat/completions', body):
            if data == b'[DONE]':
                break
            _take(outcome, json.loads(data), time.perf_counter() - origin)
        else:
            outcome.error = 'the stream ended without [DONE]'
    except (HttpError, OSError, asyncio.IncompleteReadError, ValueError) as error:
        outcome.error = f'{type(error).__name__}: {error}'
    outcome.end = time.perf_counter() - origin
    return outcome


def _take(outcome: Outcome, event: dict[str, Any], now: float) -> None:
    if 'error' in event:
        outcome.error = event['error']['message']
        return
    for choice in event['choices']:
        delta = choice['delta']
        text = (delta.get('reasoning_content') or '') + (delta.get('content') or '')
        if text:
            outcome.arrivals.append(now)
            outcome.text += text
        outcome.finish_reason = choice['finish_reason'] or outcome.finish_reason
    if usage := event.get('usage'):
        outcome.prompt_tokens, outcome.completion_tokens = usage['prompt_tokens'], usage['completion_tokens']


async def run_round(
    client: Client, bodies: list[dict[str, Any]], concurrency: int, rate: float, seed: int
) -> list[Outcome]:
    """All requests, at most `concurrency` at once; with a `rate`, they also arrive at random, so many a second."""
    places = asyncio.Semaphore(concurrency)
    rng = random.Random(seed)
    origin = time.perf_counter()

    async def one(body: dict[str, Any], wait: float) -> Outcome:
        await asyncio.sleep(wait)
        async with places:
            return await ask(client, body, origin)

    waits, clock = [], 0.0
    for _ in bodies:
        waits.append(clock)
        clock += rng.expovariate(rate) if rate else 0.0
    return await asyncio.gather(*(one(body, wait) for body, wait in zip(bodies, waits)))


async def scrape(client: Client) -> dict[str, float]:
    """The server's counters; {} where it shows none."""
    try:
        text = (await client.get('/metrics')).decode()
    except HttpError:
        return {}
    found = re.findall(r'^specdec:(\w+)\{[^}]*\} (\S+)$', text, re.M)
    return {SCRAPED[name]: float(value) for name, value in found if name in SCRAPED}


# ---------------------------------------------------------------------------------------------------------- summary
def summary(
    concurrency: int, outcomes: list[Outcome], before: dict[str, float], after: dict[str, float]
) -> dict[str, Any]:
    """One row of the report; times in milliseconds, rates per second."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    seconds = max(outcome.end for outcome in outcomes) - min(outcome.begin for outcome in outcomes)
    tokens = sum(outcome.completion_tokens for outcome in good)
    row: dict[str, Any] = {
        'concurrency': concurrency,
        'requests': len(outcomes),
        'errors': len(outcomes) - len(good),
        'seconds': round(seconds, 3),
        'requests_per_s': round(len(good) / seconds, 3),
        'prompt_tokens': sum(outcome.prompt_tokens for outcome in good),
        'completion_tokens': tokens,
        'tokens_per_s': round(tokens / seconds, 1),
    }
    times = {
        'first_token_ms': [o.arrivals[0] - o.begin for o in good if o.arrivals],
        'chunk_gap_ms': [b - a for o in good for a, b in zip(o.arrivals, o.arrivals[1:])],
        'per_token_ms': [(o.arrivals[-1] - o.arrivals[0]) / (o.completion_tokens - 1) for o in good
                         if o.arrivals and o.completion_tokens > 1],
        'request_ms': [o.end - o.begin for o in good],
    }  # fmt: skip
    for name, values in times.items():
        row |= {f'{name}_p{p}': round(1000 * percentile(values, p), 2) for p in PERCENTILES}
    row |= {name: after[name] - before.get(name, 0) for name in after}
    steps, accepted = row.get('server_drafting_steps', 0), row.get('server_accepted_tokens', 0)
    drafted = row.get('server_drafted_tokens', 0)
    row['mean_accepted_length'] = round(1 + accepted / steps, 3) if steps else None
    row['acceptance_rate'] = round(accepted / drafted, 4) if drafted else None
    return row


def percentile(values: list[float], percent: int) -> float:
    """By linear interpolation; nan without values."""
    if len(values) < 2:
        return values[0] if values else float('nan')
    return statistics.quantiles(values, n=100, method='inclusive')[percent - 1]


def show(rows: list[dict[str, Any]]) -> None:
    columns = ('concurrency', 'requests', 'errors', 'tokens_per_s', 'first_token_ms_p50', 'first_token_ms_p99',
               'per_token_ms_p50', 'per_token_ms_p99', 'request_ms_p50', 'mean_accepted_length')  # fmt: skip
    print('  '.join(columns))
    for row in rows:
        print('  '.join(f'{row[column]!s:>{len(column)}}' for column in columns))


def write(folder: Path, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'summary.json').write_text(json.dumps({'settings': settings, 'rounds': rows}, indent=2) + '\n')
    with (folder / 'summary.csv').open('w', newline='') as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    try:
        plot(folder / 'summary.png', rows)
    except ImportError:
        print('matplotlib is not installed: no plot', file=sys.stderr)


def plot(file: Path, rows: list[dict[str, Any]]) -> None:
    """Throughput and latency over concurrency."""
    import matplotlib

    matplotlib.use('agg')
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout='constrained')
    loads = [row['concurrency'] for row in rows]
    left.plot(loads, [row['tokens_per_s'] for row in rows], marker='o')
    left.set(title='throughput', xlabel='concurrent requests', ylabel='generated tokens per second')
    for percent in PERCENTILES:
        right.plot(
            loads, [row[f'first_token_ms_p{percent}'] for row in rows], marker='o', label=f'first token, p{percent}'
        )
        style = {'linestyle': 'dashed', 'marker': 's'}
        right.plot(loads, [row[f'per_token_ms_p{percent}'] for row in rows], **style, label=f'each further, p{percent}')
    right.set(title='latency', xlabel='concurrent requests', ylabel='milliseconds', yscale='log')
    right.legend(fontsize='small')
    for axes in (left, right):
        axes.set_ylim(bottom=0 if axes is left else None)
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


# ------------------------------------------------------------------------------------------------------------- main


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('url', nargs='?', default='http://localhost:23333')
    parser.add_argument('--model', help='served name; by default the first one that the server lists')
    parser.add_argument('--api-key')
    parser.add_argument('--prompts', type=Path, metavar='FILE', help='.jsonl or text; by default the demo prompts')
    parser.add_argument('--concurrency', type=int, nargs='+', default=[1, 4, 16], help='a round for each')
    parser.add_argument('--num-requests', type=int, default=64, help='in each round; prompts are repeated')
    parser.add_argument('--request-rate', type=float, default=0.0, help='arrivals a second (Poisson); 0: all at once')
    parser.add_argument('--max-tokens', type=int, default=128)
    parser.add_argument('--temperature', type=float, default=0.0)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--ignore-eos', action='store_true', help='answers of exactly --max-tokens')
    parser.add_argument('--no-speculation', action='store_true', help='decode plainly')
    parser.add_argument('--num-speculative-tokens', type=int, help='at most so many drafted tokens a step')
    parser.add_argument('--output', type=Path, default=Path('profile'), metavar='FOLDER')
    return parser.parse_args(given)


async def profile(options: argparse.Namespace) -> list[dict[str, Any]]:
    client = Client(options.url, options.api_key)
    model = options.model or json.loads(await client.get('/v1/models'))['data'][0]['id']
    body = {
        'model': model, 'stream': True, 'stream_options': {'include_usage': True}, 'max_tokens': options.max_tokens,
        'temperature': options.temperature, 'ignore_eos': options.ignore_eos,
        'speculative': not options.no_speculation, 'num_speculative_tokens': options.num_speculative_tokens,
    }  # fmt: skip
    prompts = read_prompts(options.prompts)
    bodies = [
        body | {'messages': prompts[i % len(prompts)], 'seed': options.seed + i} for i in range(options.num_requests)
    ]
    await run_round(client, bodies[:2], 1, 0, options.seed)  # nobody's first request is measured
    rows = []
    for concurrency in options.concurrency:
        before = await scrape(client)
        outcomes = await run_round(client, bodies, concurrency, options.request_rate, options.seed)
        rows.append(summary(concurrency, outcomes, before, await scrape(client)))
        for message in sorted({outcome.error for outcome in outcomes if outcome.error}):
            print(f'error: {message}', file=sys.stderr)
    return rows


def main(given: list[str] | None = None) -> None:
    options = arguments(given)
    rows = asyncio.run(profile(options))
    show(rows)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    settings.pop('api_key')
    write(options.output, settings, rows)
    print(f'written to {options.output}/summary.json, .csv and .png')


if __name__ == '__main__':
    main()
