"""The chain on a GPU: per step one kernel over the vocabulary (bias, sum, best id of each tile), one that picks.

Gated and rnn heads turn their small features with torch; what costs, the projection to the vocabulary, is the same.
Noise, where tokens are drawn with it, is added in the registers of the first kernel.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.filter_threshold.triton import filter_threshold
from specdec.kernels.launch import launch_options, release, wait
from specdec.kernels.markov import ChainDraws, MarkovWeights, Pick, ref
from specdec.kernels.noise import Noise
from specdec.kernels.noise.triton import gumbel_at_ids
from specdec.kernels.pick.triton import best_of, noisy_argmax

TILE = 128
MAX_BATCH = 64


@triton.jit
def _step_kernel(
    w1, w2, features, tokens, base, best, best_ids, temperature, seeds, positions, streams, offsets, kept,
    batch, rank, vocabulary, base_stride, tiles, step,
    BATCH: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, LOOKUP: tl.constexpr, PRECISION: tl.constexpr,
    NOISY: tl.constexpr, MAPPED: tl.constexpr, KEEP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    b, r = tl.arange(0, BATCH), tl.arange(0, RANK)
    in_n, in_b, in_r = n < vocabulary, b < batch, r < rank
    w = tl.load(w2 + n[:, None].to(tl.int64) * rank + r[None, :], mask=in_n[:, None] & in_r[None, :], other=0.0)
    wait(OVERLAP)
    if LOOKUP:
        rows = w1 + tl.load(tokens + b, mask=in_b, other=0)[:, None] * rank
    else:
        rows = features + b[:, None] * rank
    feature = tl.load(rows + r[None, :], mask=in_b[:, None] & in_r[None, :], other=0.0)
    place = b[:, None].to(tl.int64) * base_stride + n[None, :]
    logits = tl.load(base + place, mask=in_b[:, None] & in_n[None, :], other=float('-inf'))
    release(OVERLAP)
    bias = tl.dot(feature, tl.trans(w), input_precision=PRECISION).to(w.dtype).to(tl.float32)
    logits = tl.where(in_n[None, :], logits + bias, float('-inf'))
    if KEEP:
        tl.store(kept + place, logits, mask=in_b[:, None] & in_n[None, :])
    if NOISY:
        heat = tl.load(temperature + b, mask=in_b, other=0.0)
        seed = tl.load(seeds + b, mask=in_b, other=0)[:, None]
        position = tl.load(positions + b, mask=in_b, other=0)[:, None] + step
        stream = tl.load(streams + b, mask=in_b, other=0)[:, None]
        ids = n.to(tl.int64)
        if MAPPED:
            ids += tl.load(offsets + n, mask=in_n, other=0)
        noise = gumbel_at_ids(seed, position, ids[None, :] + seed * 0, stream)
        scaled = logits / tl.where(heat > 0, heat, 1.0)[:, None] + noise
        logits = tl.where((heat > 0)[:, None], scaled, logits)
    top = tl.max(logits, 1)
    ids = tl.min(tl.where(logits == top[:, None], n[None, :], 2147483647), 1)
    tl.store(best + b * tiles + tl.program_id(0), top, mask=in_b)
    tl.store(best_ids + b * tiles + tl.program_id(0), ids, mask=in_b)


@triton.jit
def _choose_kernel(
    best, best_ids, offsets, token, tokens, tiles, vocabulary, tokens_stride,
    PAD: tl.constexpr, MAPPED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    b, lane = tl.program_id(0), tl.arange(0, PAD)
    wait(OVERLAP)
    values = tl.load(best + b * tiles + lane, mask=lane < tiles, other=float('-inf'))
    ids = tl.load(best_ids + b * tiles + lane, mask=lane < tiles, other=2147483647)
    release(OVERLAP)
    _, winner = best_of(values, ids)
    chosen = tl.minimum(winner, vocabulary - 1).to(tl.int64)
    if MAPPED:
        chosen += tl.load(offsets + chosen)
    tl.store(token + b, chosen)
    tl.store(tokens + b * tokens_stride, chosen)


def _draw(draws: ChainDraws, step: int, logits: Tensor, ids: Tensor | None) -> Tensor:
    """The step's tokens [B] from its logits [B, Vd], filtered; `ids` [Vd]: the columns' target ids, if they differ."""
    assert draws.filters is not None, 'the step kernel draws by itself'
    filters = draws.filters
    cuts = (filters.top_k, filters.top_p, filters.min_p, filters.bound)
    threshold = filter_threshold(logits, draws.temperature, *cuts)
    keys = Noise(draws.noise.seeds, draws.noise.positions + step, draws.noise.streams)
    return noisy_argmax(logits, draws.temperature, threshold, keys, ids).clamp(min=0)


def markov_chain(
    base_logits: Tensor,
    hidden: Tensor,
    lead: Tensor | None,
    anchors: Tensor,
    weights: MarkovWeights,
    pick: Pick | None,
    draws: ChainDraws | None,
) -> tuple[Tensor, Tensor]:
    batch, steps, vocabulary = base_logits.shape
    if pick is not None or batch > MAX_BATCH:
        return ref.markov_chain(base_logits, hidden, lead, anchors, weights, pick, draws)
    rank, device = weights.w1.shape[1], hidden.device
    tiles = triton.cdiv(vocabulary, TILE)
    best = torch.empty(batch, tiles, dtype=torch.float32, device=device)
    best_ids = torch.empty(batch, tiles, dtype=torch.int32, device=device)
    tokens = torch.empty(batch, steps, dtype=torch.int64, device=device)
    previous = torch.empty(batch, steps, dtype=torch.int64, device=device)
    token = anchors.clone()
    state = hidden.new_zeros(batch, rank) if weights.kind == 'rnn' else None
    if state is not None and lead is not None:
        _, state = ref.step_rnn(weights, state, F.embedding(token, weights.w1), lead)
    options = launch_options(device)
    keys, kept = (None, None, None, None), None
    is_filtered = draws is not None and draws.filters is not None  # then a threshold stands between logits and draw
    if draws is not None:
        noise = draws.noise
        streams = torch.zeros_like(noise.seeds) if noise.streams is None else noise.streams
        keys, kept = (draws.temperature, noise.seeds, noise.positions, streams), draws.kept
        if is_filtered and kept is None:
            kept = torch.empty_like(base_logits)
    ids = None if weights.d2t is None else torch.arange(vocabulary, device=device) + weights.d2t
    for k in range(steps):
        previous[:, k] = token
        features = None
        if weights.kind != 'vanilla':
            features, state = ref.step_feature(weights, token, hidden[:, k], state)
        _step_kernel[(tiles,)](
            weights.w1, weights.w2, features, token, base_logits[:, k], best, best_ids, *keys, weights.d2t,
            None if kept is None else kept[:, k], batch, rank, vocabulary, base_logits.stride(0), tiles, k,
            BATCH=max(16, triton.next_power_of_2(batch)), RANK=max(16, triton.next_power_of_2(rank)), TILE=TILE,
            LOOKUP=features is None, PRECISION='ieee' if weights.w2.dtype == torch.float32 else 'tf32',
            NOISY=draws is not None and not is_filtered, MAPPED=weights.d2t is not None, KEEP=kept is not None,
            num_warps=4, **options,
        )  # fmt: skip
        if is_filtered:
            token = _draw(draws, k, kept[:, k], ids)
            token = tokens[:, k] = token if ids is None else ids[token]
            continue
        _choose_kernel[(batch,)](
            best, best_ids, weights.d2t, token, tokens[:, k], tiles, vocabulary, steps,
            PAD=triton.next_power_of_2(tiles), MAPPED=weights.d2t is not None, num_warps=4, **options,
        )  # fmt: skip
    return tokens, previous
