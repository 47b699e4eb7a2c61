"""The threshold on a GPU, without ranking the vocabulary: the k-th value and the mass's cut are found by bisection.

The best top_k ids lie in the top_k chunks of the row with the largest maxima: rows with a top_k up to MAX_CHUNKS read
only those, and bisect in registers. Other rows bisect over the row itself. Bisection is over the 2^32 keys in which
floats have the order of integers, so it is exact; every sum is a row's own, in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import launch_options, release, wait

CHUNK = 128
MAX_CHUNKS = 64  # also the largest top_k of the fast way
TILE = 4096


@triton.jit
def _key(values):
    """int32 in the order of the floats."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The float of a key (int64 scalar)."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(values, heat):
    return values / tl.where(heat > 0, heat, 1.0)


@triton.jit
def _maxima_kernel(
    logits, temperature, maxima, vocabulary, row_stride, chunks,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    ids = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    wait(OVERLAP)
    release(OVERLAP)
    values = tl.load(logits + row * row_stride + ids, mask=ids < vocabulary, other=float('-inf'))
    tl.store(maxima + row * chunks + chunk, tl.max(_scaled(values, tl.load(temperature + row)), 1), mask=chunk < chunks)


@triton.jit
def _chunks_kernel(
    maxima, top_k, chosen, num_chosen, chunks, PAD: tl.constexpr, MAX_CHUNKS: tl.constexpr, OVERLAP: tl.constexpr
):
    """The chunks that hold the row's best top_k values; num_chosen 0: not so few, or no small top_k."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, PAD)
    wait(OVERLAP)
    release(OVERLAP)
    wanted = tl.load(top_k + row)
    inside = lane < chunks
    values = tl.load(maxima + row * chunks + lane, mask=inside, other=float('-inf'))
    count = 0
    if (wanted > 0) & (wanted <= MAX_CHUNKS):
        keys = _key(values)
        wanted = tl.minimum(wanted, chunks)
        low, high = tl.min(keys, 0).to(tl.int64), tl.max(keys, 0).to(tl.int64) + 1
        for _ in range(33):  # the largest key that as many maxima reach
            middle = (low + high) >> 1
            enough = tl.sum(((keys >= middle) & inside).to(tl.int32), 0) >= wanted
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        reaches = (keys >= low) & inside
        place = tl.cumsum(reaches.to(tl.int32), 0) - 1
        count = tl.sum(reaches.to(tl.int32), 0)
        tl.store(chosen + row * MAX_CHUNKS + place, lane, mask=reaches & (place < MAX_CHUNKS))
        count = tl.where(count <= MAX_CHUNKS, count, 0)
    tl.store(num_chosen + row, count)


@triton.jit
def _few_kernel(
    logits, temperature, top_k, top_p, min_p, chosen, num_chosen, out, vocabulary, row_stride,
    MAX_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait(OVERLAP)
    release(OVERLAP)
    count = tl.load(num_chosen + row)
    if count == 0:
        return
    lane = tl.arange(0, MAX_CHUNKS)
    chunk = tl.load(chosen + row * MAX_CHUNKS + lane, mask=lane < count, other=0)
    ids = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    there = (lane < count)[:, None] & (ids < vocabulary)
    values = tl.load(logits + row * row_stride + ids, mask=there, other=float('-inf'))
    values = tl.reshape(_scaled(values, tl.load(temperature + row)), (MAX_CHUNKS * CHUNK,))
    keys, top = _key(values), tl.max(values, 0)
    wanted = tl.load(top_k + row)
    low, high = tl.min(keys, 0).to(tl.int64), tl.max(keys, 0).to(tl.int64) + 1
    for _ in range(33):
        middle = (low + high) >> 1
        enough = tl.sum((keys >= middle).to(tl.int32), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    p = tl.load(top_p + row)
    if p < 1:
        weights = tl.where(keys >= low, tl.exp(values - top), 0.0)
        goal = p * tl.sum(weights, 0)
        under, high = low - 1, tl.max(keys, 0).to(tl.int64)
        for _ in range(33):  # the smallest key above which less than the goal lies
            middle = (under + high) >> 1
            less = tl.sum(tl.where(keys > middle, weights, 0.0), 0) < goal
            high = tl.where(less, middle, high)
            under = tl.where(less, under, middle)
        low = high
    tl.store(out + row, tl.maximum(_value(low), top + tl.log(tl.load(min_p + row))))


@triton.jit
def _all_kernel(
    logits, temperature, top_k, top_p, min_p, maxima, num_chosen, out, vocabulary, row_stride, chunks,
    PAD: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait(OVERLAP)
    release(OVERLAP)
    if tl.load(num_chosen + row) > 0:
        return
    wanted, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    heat = tl.load(temperature + row)
    source = logits + row * row_stride
    lane = tl.arange(0, PAD)
    top = tl.max(tl.load(maxima + row * chunks + lane, mask=lane < chunks, other=float('-inf')), 0)
    ids = tl.arange(0, TILE)
    lowest = tl.full((), -2139095041, tl.int64)  # the key of -inf
    highest = _key(top).to(tl.int64)
    low = lowest
    if (wanted > 0) & (wanted < vocabulary):
        high = highest + 1
        for _ in range(33):
            middle = (low + high) >> 1
            count = 0
            for start in range(0, vocabulary, TILE):
                tile = tl.load(source + start + ids, mask=start + ids < vocabulary, other=float('-inf'))
                count += tl.sum(((_key(_scaled(tile, heat)) >= middle) & (start + ids < vocabulary)).to(tl.int32), 0)
            low = tl.where(count >= wanted, middle, low)
            high = tl.where(count >= wanted, high, middle)
    if p < 1:
        total = 0.0
        for start in range(0, vocabulary, TILE):
            tile = tl.load(source + start + ids, mask=start + ids < vocabulary, other=float('-inf'))
            tile = _scaled(tile, heat)
            total += tl.sum(tl.where(_key(tile) >= low, tl.exp(tile - top), 0.0), 0)
        under, high = low - 1, highest
        for _ in range(33):
            middle = (under + high) >> 1
            mass = 0.0
            for start in range(0, vocabulary, TILE):
                tile = tl.load(source + start + ids, mask=start + ids < vocabulary, other=float('-inf'))
                tile = _scaled(tile, heat)
                mass += tl.sum(tl.where(_key(tile) > middle, tl.exp(tile - top), 0.0), 0)
            less = mass < p * total
            high = tl.where(less, middle, high)
            under = tl.where(less, under, middle)
        low = high
    tl.store(out + row, tl.maximum(_value(low), top + tl.log(least)))


def filter_threshold(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, bound: int
) -> Tensor:
    rows, vocabulary = logits.shape
    device, options = logits.device, launch_options(logits.device)
    chunks = triton.cdiv(vocabulary, CHUNK)
    pad = triton.next_power_of_2(chunks)
    maxima = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    chosen = torch.empty(rows, MAX_CHUNKS, dtype=torch.int32, device=device)
    num_chosen = torch.empty(rows, dtype=torch.int32, device=device)
    out = torch.empty(rows, dtype=torch.float32, device=device)
    per_program = TILE // CHUNK
    stride = logits.stride(0)
    _maxima_kernel[(rows, triton.cdiv(chunks, per_program))](
        logits, temperature, maxima, vocabulary, stride, chunks, ROWS=per_program, CHUNK=CHUNK, num_warps=8, **options
    )
    _chunks_kernel[(rows,)](
        maxima, top_k, chosen, num_chosen, chunks, PAD=pad, MAX_CHUNKS=MAX_CHUNKS, num_warps=4, **options
    )
    _few_kernel[(rows,)](
        logits, temperature, top_k, top_p, min_p, chosen, num_chosen, out, vocabulary, stride,
        MAX_CHUNKS=MAX_CHUNKS, CHUNK=CHUNK, num_warps=8, **options,
    )  # fmt: skip
    _all_kernel[(rows,)](
        logits, temperature, top_k, top_p, min_p, maxima, num_chosen, out, vocabulary, stride, chunks,
        PAD=pad, TILE=TILE, num_warps=8, **options,
    )  # fmt: skip
    return out
