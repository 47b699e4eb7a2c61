"""Each operator of a decode step against the bytes it must move, and against cuBLAS or torch's attention.

    python -m benchmark.bench_kernels --json out.json
    python -m benchmark.bench_kernels --sweep 120        # other tiles for the products, for so many seconds

Qwen3-8B widths, bf16. Inputs rotate past the L2, every measurement is one CUDA graph over the rotation.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmark.timing import bandwidth, graph_seconds
from specdec.kernels.linear import triton as products
from specdec.kernels.markov import MarkovWeights, markov_chain
from specdec.kernels.norm import rms_norm
from specdec.kernels.paged_attention import RowLayout, paged_attention, plan_paged_attention
from specdec.kernels.pick import argmax

DEVICE = torch.device('cuda')
ROTATED = 600e6  # bytes of weights that one measurement runs through
HEADS, KV_HEADS, DIM, SIZE, INNER, VOCABULARY, PAGE = 32, 8, 128, 4096, 12288, 151936, 64
SHAPES = {
    'qkv': ((HEADS + 2 * KV_HEADS) * DIM, SIZE),
    'o': (SIZE, HEADS * DIM),
    'gate_up': (2 * INNER, SIZE),
    'down': (SIZE, INNER),
    'head': (VOCABULARY, SIZE),
}
PER_STEP = {'qkv': 36, 'o': 36, 'gate_up': 36, 'down': 36, 'head': 1}


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * 0.02


def _weights(name: str) -> list[torch.Tensor]:
    outputs, inputs = SHAPES[name]
    return [_random(outputs, inputs) for _ in range(max(2, int(ROTATED / (2 * outputs * inputs)) + 1))]


def _ours(name: str, rows: int, tile: tuple[int, int, int, int] | None = None) -> Callable[[torch.Tensor], object]:
    outputs, inputs = SHAPES[name]
    x = _random(rows, inputs) * 50
    residual = _random(rows, outputs)
    if name in ('o', 'down'):
        return lambda weight: products._rows(x, weight, residual=residual, tile=tile)
    if name == 'gate_up':
        return lambda weight: products._rows(x, weight, gated=True, tile=tile)
    dtype = torch.float32 if name == 'head' else None
    return lambda weight: products._rows(x, weight, dtype=dtype, tile=tile)


def measure_products(rate: float, counts: list[int]) -> list[dict[str, Any]]:
    found = []
    for name, (outputs, inputs) in SHAPES.items():
        weights = _weights(name)
        for rows in counts:
            x = _random(rows, inputs)
            ours = _ours(name, rows)
            times = {
                'ours': graph_seconds(lambda: [ours(w) for w in weights]) / len(weights),
                'cublas': graph_seconds(lambda: [F.linear(x, w) for w in weights]) / len(weights),
            }
            found.append(_row(f'{name} {rows} rows', times, 2 * outputs * inputs, rate) | {'count': PER_STEP[name]})
    return found


def measure_attention(rate: float, cases: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """(requests, rows each, context): the whole operator, writes and merging included."""
    found = []
    for batch, rows, context in cases:
        pages = -(-(context + rows) // PAGE)
        copies = max(2, int(ROTATED / (batch * context * 4 * KV_HEADS * DIM)) + 1)
        caches = [(_random(batch * pages + 1, PAGE, KV_HEADS, DIM), _random(batch * pages + 1, PAGE, KV_HEADS, DIM))
                  for _ in range(copies)]  # fmt: skip
        table = torch.arange(1, batch * pages + 1, device=DEVICE, dtype=torch.int32).view(batch, pages)
        offsets = torch.arange(batch + 1, device=DEVICE) * rows
        contexts = torch.full((batch,), context, device=DEVICE)
        layout = RowLayout(offsets, contexts, table, (), rows, PAGE)
        total = batch * rows
        qkv, norms = _random(total, (HEADS + 2 * KV_HEADS) * DIM), _random(HEADS + KV_HEADS, DIM)
        rotary = torch.rand(2, total, 1, DIM, device=DEVICE).unbind(0)
        slots = torch.zeros(total, dtype=torch.int64, device=DEVICE)
        plan = plan_paged_attention(layout, HEADS // KV_HEADS, frozenset([None]), torch.bfloat16)

        def ours() -> None:
            for k, v in caches:
                paged_attention(qkv, norms, 1e-6, rotary, k, v, slots, plan, None, DIM**-0.5)

        q = _random(batch, HEADS, rows, DIM)
        dense = [[c[1:].view(batch, pages * PAGE, KV_HEADS, DIM).transpose(1, 2) for c in pair] for pair in caches]

        def sdpa() -> None:
            for k, v in dense:
                F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        times = {'ours': graph_seconds(ours) / copies, 'torch': graph_seconds(sdpa) / copies}
        moved = batch * context * 4 * KV_HEADS * DIM
        found.append(_row(f'attention {batch} x {rows} rows, context {context}', times, moved, rate) | {'count': 36})
    return found


def measure_rest(rate: float) -> list[dict[str, Any]]:
    found = []
    for rows in (1, 8, 64):
        x, norm, logits = _random(rows, SIZE), _random(SIZE), torch.randn(rows, VOCABULARY, device=DEVICE)
        norms = graph_seconds(lambda: [rms_norm(x, norm, 1e-6) for _ in range(50)]) / 50
        found.append(_row(f'norm {rows} rows', {'ours': norms}, 4 * rows * SIZE, rate) | {'count': 73})
        picks = graph_seconds(lambda: [argmax(logits) for _ in range(20)]) / 20
        found.append(_row(f'argmax {rows} rows', {'ours': picks}, 4 * rows * VOCABULARY, rate) | {'count': 1})
    for batch in (1, 8):
        weights = MarkovWeights(_random(VOCABULARY, 256), _random(VOCABULARY, 256), 'vanilla')
        base, hidden = torch.randn(batch, 7, VOCABULARY, device=DEVICE), _random(batch, 7, SIZE)
        anchors = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
        chain = graph_seconds(lambda: markov_chain(base, hidden, None, anchors, weights))
        moved = 7 * 2 * VOCABULARY * 256
        found.append(_row(f'markov chain of 7, batch {batch}', {'ours': chain}, moved, rate) | {'count': 1})
    return found


def _row(name: str, times: dict[str, float], moved: int, rate: float) -> dict[str, Any]:
    row: dict[str, Any] = {'name': name, 'floor_us': moved / rate * 1e6}
    row |= {f'{who}_us': value * 1e6 for who, value in times.items()}
    print(f'{name:42}', ' '.join(f'{k} {v:8.1f}' for k, v in row.items() if k != 'name'), flush=True)
    return row


def sweep(limit: float, rows: int) -> None:
    """Try tiles for each product until the time is up; the best of each is printed."""
    start = time.perf_counter()
    for name, (outputs, _) in SHAPES.items():
        weights, best = _weights(name), (float('inf'), None)
        share = start + limit * (list(SHAPES).index(name) + 1) / len(SHAPES)
        for block_k, block_n, warps, stages in itertools.product((128, 256), (16, 32, 64, 128), (4, 8), (3, 4, 5)):
            shared = (block_n * (2 if name == 'gate_up' else 1) + max(16, rows)) * block_k * 2 * stages
            programs = outputs // (2 if name == 'gate_up' else 1) / block_n
            if not 40_000 < shared < 220_000 or programs < 90 or time.perf_counter() > share:
                continue
            tile = (block_n, block_k, warps, stages)
            run = _ours(name, rows, tile)
            try:
                took = graph_seconds(lambda: [run(w) for w in weights], 3) / len(weights)
            except Exception as error:
                print(name, tile, type(error).__name__, flush=True)
                continue
            best = min(best, (took, tile), key=lambda pair: pair[0])
        print(f'sweep {name} {rows} rows: {best[0] * 1e6:.1f} us {best[1]}', flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rows', nargs='+', type=int, default=[1, 8, 32, 64])
    parser.add_argument('--sweep', type=float, default=0, help='seconds to spend on other tiles')
    parser.add_argument('--json', type=Path)
    args = parser.parse_args()
    rate = bandwidth(DEVICE)
    print(f'{torch.cuda.get_device_name()}, torch {torch.__version__}: large reads {rate / 1e12:.2f} TB/s', flush=True)
    rows = measure_products(rate, args.rows)
    rows += measure_attention(rate, [(1, 1, 1024), (1, 8, 1024), (8, 8, 1024), (32, 1, 1024), (1, 8, 32768)])
    rows += measure_rest(rate)
    if args.sweep:
        for count in (8, 64):
            sweep(args.sweep / 2, count)
    if args.json:
        args.json.write_text(json.dumps({'bandwidth': rate, 'rows': rows}, indent=1))


if __name__ == '__main__':
    main()
