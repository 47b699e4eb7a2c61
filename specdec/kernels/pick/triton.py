"""Picks on a GPU: tiles of the vocabulary find their best id, a second kernel the best of the tiles."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import launch_options, release, wait
from specdec.kernels.noise import Noise
from specdec.kernels.noise.triton import gumbel_at_ids, gumbel_tile

TILE = 4096


@triton.jit
def best_of(values, ids):
    """Largest value and, among equals, the lowest id of a 1-D tile."""
    top = tl.max(values, 0)
    return top, tl.min(tl.where(values == top, ids, 2147483647), 0)


@triton.jit
def _tiles_kernel(
    logits, temperature, threshold, seeds, positions, streams, column_ids, best, best_ids, vocabulary, row_stride,
    tiles,
    TILE: tl.constexpr, NOISY: tl.constexpr, FILTERED: tl.constexpr, STREAMS: tl.constexpr, MAPPED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0), tl.program_id(1)
    source = logits + row.to(tl.int64) * row_stride
    ids = tile * TILE + tl.arange(0, TILE)
    wait(OVERLAP)
    release(OVERLAP)
    values = tl.load(source + ids, mask=ids < vocabulary, other=float('-inf'))
    if NOISY:
        heat = tl.load(temperature + row)
        if heat > 0:
            values = values / heat
            if FILTERED:
                values = tl.where(values < tl.load(threshold + row), float('-inf'), values)
            stream = tl.load(streams + row) if STREAMS else tl.full((), 0, tl.int64)
            seed, position = tl.load(seeds + row), tl.load(positions + row)
            if MAPPED:
                mapped = tl.load(column_ids + ids, mask=ids < vocabulary, other=0)
                values += gumbel_at_ids(seed, position, mapped, stream)
            else:
                quads = tile * (TILE // 4) + tl.arange(0, TILE // 4)
                values += gumbel_tile(seed, position, quads, stream, TILE)
    top, top_id = best_of(values, ids)
    tl.store(best + row * tiles + tile, top)
    tl.store(best_ids + row * tiles + tile, top_id)


@triton.jit
def _best_tile_kernel(best, best_ids, out, tiles, vocabulary, PAD: tl.constexpr, OVERLAP: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, PAD)
    wait(OVERLAP)
    values = tl.load(best + row * tiles + lane, mask=lane < tiles, other=float('-inf'))
    ids = tl.load(best_ids + row * tiles + lane, mask=lane < tiles, other=2147483647)
    release(OVERLAP)
    top, winner = best_of(values, ids)
    winner = tl.minimum(winner, vocabulary - 1)  # a row of NaN has no winner
    tl.store(out + row, tl.where(top == float('-inf'), -1, winner).to(tl.int64))


def _pick(
    logits: Tensor, temperature: Tensor | None, threshold: Tensor | None, noise: Noise | None, ids: Tensor | None
) -> Tensor:
    rows, vocabulary = logits.shape
    tiles = triton.cdiv(vocabulary, TILE)
    device, options = logits.device, launch_options(logits.device)
    best = torch.empty(rows, tiles, dtype=torch.float32, device=device)
    best_ids = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    seeds, positions, streams = (None, None, None) if noise is None else (noise.seeds, noise.positions, noise.streams)
    _tiles_kernel[(rows, tiles)](
        logits, temperature, threshold, seeds, positions, streams, ids, best, best_ids, vocabulary, logits.stride(0),
        tiles, TILE=TILE, NOISY=noise is not None, FILTERED=threshold is not None, STREAMS=streams is not None,
        MAPPED=ids is not None, num_warps=8, **options,
    )  # fmt: skip
    pad = triton.next_power_of_2(tiles)
    _best_tile_kernel[(rows,)](best, best_ids, out, tiles, vocabulary, PAD=pad, num_warps=1, **options)
    return out


def argmax(logits: Tensor) -> Tensor:
    return _pick(logits.reshape(-1, logits.shape[-1]), None, None, None, None).view(logits.shape[:-1])


def noisy_argmax(
    logits: Tensor, temperature: Tensor, threshold: Tensor | None, noise: Noise, ids: Tensor | None
) -> Tensor:
    return _pick(logits, temperature, threshold, noise, ids)
