"""The gated delta rule in plain torch: decoding rows one by one, prompt chunks by 64 at a time."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.gated_delta_rule import DeltaGates, DeltaHeads, DeltaState
from specdec.kernels.state_rows import StateRows

CHUNK = 64


def gated_delta_rule(qkv: Tensor, gates: DeltaGates, cache: DeltaState, heads: DeltaHeads, rows: StateRows) -> Tensor:
    out = torch.zeros(qkv.shape[0], heads.values, dtype=qkv.dtype, device=qkv.device)
    if rows.chunk_rows:
        fold(cache, heads, rows.chunks())
    run_chunks(qkv, gates, cache, heads, rows, out)
    decodes = rows.decodes()
    if len(decodes.slots):
        _run_decodes(qkv, gates, cache, heads, decodes, out)
    return out


def fold(cache: DeltaState, heads: DeltaHeads, rows: StateRows) -> None:
    cache.state.index_copy_(0, rows.slots, _folded(cache, heads, rows))


def _folded(cache: DeltaState, heads: DeltaHeads, rows: StateRows) -> Tensor:
    """Each request's state in front of its first row [B, HV, dk, dv]."""
    state = torch.where(rows.fresh[:, None, None, None], 0, cache.state[rows.slots])
    inputs, gates = cache.inputs[rows.slots, rows.parity], cache.gates[rows.slots, rows.parity]
    for i in range(int(rows.pending.max())):
        k, v = _split(inputs[:, i].to(state.dtype), heads, (heads.keys, heads.values))
        g, beta = gates[:, i].to(state.dtype).chunk(2, -1)
        after = _update(state, _unit(k), v, g, beta)
        state = torch.where((i < rows.pending)[:, None, None, None], after, state)
    return state


def _run_decodes(
    qkv: Tensor, gates: DeltaGates, cache: DeltaState, heads: DeltaHeads, rows: StateRows, out: Tensor
) -> None:
    state = _folded(cache, heads, rows)
    cache.state.index_copy_(0, rows.slots, state)
    counts = rows.offsets[1:] - rows.offsets[:-1]
    height = int(counts.max())
    step = torch.arange(height, device=qkv.device)
    index = (rows.offsets[:-1, None] + step).clamp(max=qkv.shape[0] - 1)
    mine = step < counts[:, None]
    q, k, v = _split(qkv[index].to(state.dtype), heads, (heads.keys, heads.keys, heads.values))
    g, beta = decay_and_rate(gates, index, state.dtype)
    q, unit = _unit(q) * heads.key_dim**-0.5, _unit(k)
    for i in range(height):
        state = _update(state, unit[:, i], v[:, i], g[:, i], beta[:, i])  # rows behind a request's last are not read
        read = (state * q[:, i, :, :, None]).sum(-2).flatten(1).to(out.dtype)
        out[index[mine[:, i], i]] = read[mine[:, i]]
    cache.inputs[rows.slots, 1 - rows.parity, :height] = qkv[index][..., heads.keys :]
    cache.gates[rows.slots, 1 - rows.parity, :height] = torch.cat([g, beta], -1).to(cache.gates.dtype)


def run_chunks(
    qkv: Tensor, gates: DeltaGates, cache: DeltaState, heads: DeltaHeads, rows: StateRows, out: Tensor
) -> None:
    """The prompt chunks' rows of `out`, and their slots' states, which have no rows pending."""
    dtype, start = cache.state.dtype, 0
    for r, count in enumerate(rows.chunk_rows):
        index = torch.arange(start, start + count, device=qkv.device)
        q, k, v = _split(qkv[start : start + count].to(dtype), heads, (heads.keys, heads.keys, heads.values))
        g, beta = decay_and_rate(gates, index, dtype)
        slot = rows.slots[r : r + 1]
        q = _unit(q) * heads.key_dim**-0.5
        read, state = _by_chunks(q, _unit(k), v, g, beta, cache.state[slot][0])
        out[start : start + count] = read.flatten(1).to(out.dtype)
        cache.state.index_copy_(0, slot, state[None])
        start += count


def _by_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [n, HV, d] behind `state` [HV, dk, dv] -> outputs [n, HV, dv] and the state behind them.

    With G the sum of g within a chunk, the rows' corrections u solve (I + A) u = beta (v - exp(G) k S), where
    A[i, j] = beta_i exp(G_i - G_j) k_i . k_j below the diagonal (https://arxiv.org/abs/2412.06464). All chunks are
    solved at once for both right-hand sides; only what S brings is left to go chunk by chunk.
    """
    count = len(k)
    size = min(CHUNK, count)

    def chunks(x: Tensor) -> Tensor:
        """[n, HV, ...] -> [HV, chunks, size, ...]; rows of zeros behind the last change nothing."""
        padded = F.pad(x, (0, 0) * (x.dim() - 1) + (0, -count % size))
        return padded.unflatten(0, (-1, size)).movedim(2, 0)

    q, k, v, g, beta = chunks(q), chunks(k), chunks(v), chunks(g), chunks(beta)
    total, rate = g.cumsum(-1), beta[..., None]
    decays = (total[..., None] - total[..., None, :]).tril().exp().tril()
    grown = total.exp()[..., None]
    sides = torch.cat([rate * v, rate * grown * k], -1)
    solved = torch.linalg.solve_triangular(rate * (k @ k.mT) * decays, sides, upper=False, unitriangular=True)
    fresh, known = solved.split((v.shape[-1], k.shape[-1]), -1)
    scores, q = (q @ k.mT) * decays, q * grown
    k = k * (total[..., -1:] - total).exp()[..., None]
    left = total[..., -1, None, None].exp()
    outputs = []
    for i in range(k.shape[1]):
        new = fresh[:, i] - known[:, i] @ state
        outputs.append(q[:, i] @ state + scores[:, i] @ new)
        state = state * left[:, i] + k[:, i].mT @ new
    return torch.cat(outputs, 1)[:, :count].transpose(0, 1), state


def _update(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One row of every request: state [B, HV, dk, dv], k [B, HV, dk], v [B, HV, dv], g and beta [B, HV]."""
    state = state * g.exp()[..., None, None]
    known = (state * k[..., None]).sum(-2)
    return state + k[..., None] * ((v - known) * beta[..., None])[..., None, :]


def decay_and_rate(gates: DeltaGates, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """g and beta of the packed rows `index`, each [..., HV]."""
    b, a = gates.rows[index].to(dtype).chunk(2, -1)
    return -gates.a_log.to(dtype).exp() * F.softplus(a + gates.dt_bias.to(dtype)), b.sigmoid()


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _split(x: Tensor, heads: DeltaHeads, widths: tuple[int, ...]) -> list[Tensor]:
    """Columns (q,) k, v [..., n] -> heads [..., HV, d], key heads repeated."""
    *keys, values = x.split(widths, -1)
    group = heads.value_heads // heads.key_heads
    found = [part.unflatten(-1, (heads.key_heads, heads.key_dim)).repeat_interleave(group, -2) for part in keys]
    return [*found, values.unflatten(-1, (heads.value_heads, heads.value_dim))]
