"""What a recurrent layer's own operators take at a decode step, against the bytes of a state read and written once.

    python -m benchmark.bench_recurrent --batch 1 8 32 64 --json out.json

Qwen3.5-35B-A3B's heads (16 key heads, 32 value heads of 128), bf16 rows, fp32 states. States rotate past the L2, every
measurement is one CUDA graph over the rotation. `rows`: what each request verifies; `pending`: what was accepted of its
last step and is folded in. The rule is measured with several tiles, value channels times warps of a program.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmark.timing import bandwidth, graph_seconds
from specdec.kernels.causal_conv1d import causal_conv1d
from specdec.kernels.gated_delta_rule import DeltaGates, DeltaHeads, DeltaState
from specdec.kernels.gated_delta_rule import triton as rule
from specdec.kernels.gates import gated_rms_norm
from specdec.kernels.state_rows import StateRows

DEVICE = torch.device('cuda')
HEADS, WIDTH, MAX_ROWS = DeltaHeads(16, 32, 128, 128), 4, 8
CHANNELS = 2 * HEADS.keys + HEADS.values
ROTATED = 600e6  # bytes of state that one measurement runs through
TILES = (8, 4), (16, 2), (16, 4), (32, 4), (32, 8), (64, 8)


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def _state(slots: int) -> DeltaState:
    gates = torch.rand(slots, 2, MAX_ROWS, 2 * HEADS.value_heads, device=DEVICE)
    gates[..., : HEADS.value_heads] *= -0.1  # g is below 0
    return DeltaState(
        _random(slots, HEADS.value_heads, HEADS.key_dim, HEADS.value_dim, dtype=torch.float32),
        _random(slots, 2, MAX_ROWS, HEADS.keys + HEADS.values),
        gates,
    )


def measure(rate: float, batch: int, rows: int, pending: int) -> dict[str, Any]:
    """Microseconds of each operator at one step shape, and the rule's floor."""
    moved = 2 * batch * HEADS.value_heads * HEADS.key_dim * HEADS.value_dim * 4
    copies = max(2, int(ROTATED / moved) + 1)
    caches = [_state(batch + 1) for _ in range(copies)]
    windows = [_random(batch + 1, 2, WIDTH - 1 + MAX_ROWS, CHANNELS) for _ in range(copies)]
    step = StateRows(
        slots=torch.arange(1, batch + 1, device=DEVICE),
        offsets=torch.arange(batch + 1, device=DEVICE) * rows,
        pending=torch.full((batch,), pending, device=DEVICE),
        parity=torch.zeros(batch, dtype=torch.int64, device=DEVICE),
        fresh=torch.zeros(batch, dtype=torch.bool, device=DEVICE),
        chunk_rows=(),
    )
    total, gate_count = batch * rows, 2 * HEADS.value_heads
    projected = _random(total, CHANNELS + HEADS.values + gate_count)
    mixed, z, raw = projected.split((CHANNELS, HEADS.values, gate_count), 1)
    qkv, read, weight = _random(total, CHANNELS), _random(total, HEADS.values), _random(CHANNELS, WIDTH)
    constants = torch.zeros(HEADS.value_heads, device=DEVICE)
    gates = DeltaGates(raw, constants, constants)
    row: dict[str, Any] = {'batch': batch, 'rows': rows, 'pending': pending, 'floor_us': moved / rate * 1e6}
    for tile in TILES:
        took = graph_seconds(lambda t=tile: [rule.gated_delta_rule(qkv, gates, c, HEADS, step, t) for c in caches])
        row[f'rule_{tile[0]}x{tile[1]}_us'] = took / copies * 1e6
    row['ratio'] = row[f'rule_{rule.TILE[0]}x{rule.TILE[1]}_us'] / row['floor_us']
    row['conv_us'] = graph_seconds(lambda: [causal_conv1d(mixed, weight, w, step) for w in windows]) / copies * 1e6
    norm = _random(HEADS.value_dim)
    row['norm_us'] = graph_seconds(lambda: [gated_rms_norm(read, z, norm, 1e-6) for _ in range(50)]) / 50 * 1e6
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--batch', nargs='+', type=int, default=[1, 8, 32, 64])
    parser.add_argument('--json', type=Path)
    args = parser.parse_args()
    rate = bandwidth(DEVICE)
    print(f'{torch.cuda.get_device_name()}, torch {torch.__version__}: large reads {rate / 1e12:.2f} TB/s', flush=True)
    found = []
    for batch in args.batch:
        for rows, pending in ((1, 0), (1, 1), (MAX_ROWS, 1), (MAX_ROWS, MAX_ROWS)):
            found.append(measure(rate, batch, rows, pending))
            shown = ' '.join(f'{k}={v:.2f}' if isinstance(v, float) else f'{k}={v}' for k, v in found[-1].items())
            print(shown, flush=True)
    if args.json:
        args.json.write_text(json.dumps({'bandwidth': rate, 'rows': found}, indent=1))


if __name__ == '__main__':
    main()
