"""The operators of DeepSeek-V4 against their formulas, written as loops in double precision."""

import math

import pytest
import torch
from torch import Tensor

from specdec.kernels.compressor import Entries, compress, write_entries
from specdec.kernels.hyper_connections import MixWeights, collapse, collapse_head, expand
from specdec.kernels.indexer import choose_entries
from specdec.kernels.moe import expert_mlps, route_sqrt_softplus
from specdec.kernels.ring import RingStep, Sources, ring_places, ring_read, ring_step, ring_write, sources
from specdec.kernels.sink_attention import Compressed, sink_attention


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------- rings
def step_of(starts: list[int], counts: list[int], padding: int = 0) -> RingStep:
    offsets = torch.tensor([0, *counts]).cumsum(0)
    positions = [torch.arange(start, start + count) for start, count in zip(starts, counts)]
    slots = torch.arange(1, len(starts) + 1)
    return ring_step(offsets, torch.tensor(starts), slots, torch.cat([*positions, torch.zeros(padding).long()]))


def test_rings_hold_the_last_rows_whatever_the_steps():
    """Each row's window is what a plain list would give; a long chunk leaves its last rows only."""
    capacity, window = 7, 5
    ring, told = torch.full((3, capacity, 1), float('nan')), {1: [], 2: []}
    generator = torch.Generator().manual_seed(1)
    while len(told[1]) < 60:
        counts = torch.randint(1, 12, (2,), generator=generator).tolist()
        step = step_of([len(told[1]), len(told[2])], counts, padding=2)
        fresh = torch.randn(sum(counts) + 2, 1, generator=generator)
        back = torch.arange(window - 1, -1, -1)
        wanted = sources(step, step.requests, step.positions[:, None] - back, capacity)
        found = ring_read(ring, fresh, wanted)[..., 0]
        for slot, rows in zip((1, 2), fresh.split([*counts, 2])):
            told[slot] += rows.flatten().tolist()
        ring_write(ring, fresh, ring_places(step, capacity))
        for row, (request, position) in enumerate(zip(step.requests.tolist(), step.positions.tolist())):
            if request < 2:
                history = torch.tensor(told[request + 1][max(0, position + 1 - window) : position + 1])
                assert torch.equal(found[row][window - len(history) :], history)
                assert not found[row][: window - len(history)].any()


# ------------------------------------------------------------------------------------------------ hyper-connections
def mix_weights(outputs: int, scales: int, n: int, size: int) -> MixWeights:
    return MixWeights(torch.randn(outputs, n * size) * 0.3, torch.randn(outputs), torch.rand(scales), 1e-6, 1e-3, 4)


def test_streams_are_collapsed_and_expanded():
    torch.manual_seed(2)
    rows, n, size = 3, 4, 5
    streams, y, w = torch.randn(rows, n, size), torch.randn(rows, size), mix_weights(24, 3, n, size)
    x, post, comb = collapse(streams, w)
    new = expand(y, streams, post, comb)
    for t in range(rows):
        flat = streams[t].flatten().double()
        m = w.fn.double() @ (flat / (flat.square().mean() + w.norm_eps).sqrt())
        base, scale = w.base.double(), w.scale.double()
        pre = torch.sigmoid(m[:n] * scale[0] + base[:n]) + w.eps
        after = 2 * torch.sigmoid(m[n : 2 * n] * scale[1] + base[n : 2 * n])
        matrix = (m[2 * n :] * scale[2] + base[2 * n :]).view(n, n).softmax(-1) + w.eps
        matrix = matrix / (matrix.sum(0, keepdim=True) + w.eps)
        for _ in range(w.iterations - 1):
            matrix = matrix / (matrix.sum(1, keepdim=True) + w.eps)
            matrix = matrix / (matrix.sum(0, keepdim=True) + w.eps)
        close(x[t], sum(pre[j] * streams[t, j].double() for j in range(n)))
        for k in range(n):
            kept = sum(matrix[j, k] * streams[t, j].double() for j in range(n))
            close(new[t, k], after[k] * y[t].double() + kept)


def test_the_head_collapses_without_mixing():
    torch.manual_seed(3)
    streams, w = torch.randn(2, 4, 5), mix_weights(4, 1, 4, 5)
    for found, rows in zip(collapse_head(streams, w), streams.double()):
        m = w.fn.double() @ (rows.flatten() / (rows.square().mean() + w.norm_eps).sqrt())
        pre = torch.sigmoid(m * w.scale.double() + w.base.double()) + w.eps
        close(found, pre @ rows)


# ------------------------------------------------------------------------------------------------------- compressor
@pytest.mark.parametrize(('ratio', 'overlap'), [(4, True), (6, False)])
def test_entries_are_weighted_sums_per_channel(ratio: int, overlap: bool):
    torch.manual_seed(4)
    width, series = 3, 2 if overlap else 1
    rows = torch.randn(5 * ratio, 2 * series * width)
    step = step_of([0], [len(rows)])
    entries = torch.arange(5)
    reach = series * ratio
    positions = (entries[:, None] + 1) * ratio + torch.arange(-reach, 0)
    windows = sources(step, torch.zeros(5).long(), positions, capacity=9)
    found = compress(torch.full((2, 9, 2 * series * width), float('nan')), rows, windows, overlap)
    values, gates = rows.double().split(series * width, 1)
    for j in range(5):
        for channel in range(width):
            terms = []
            for p in range((j - 1) * ratio if overlap else j * ratio, (j + 1) * ratio):
                if p >= 0:
                    column = channel + (width if overlap and p >= j * ratio else 0)
                    terms.append((gates[p, column].item(), values[p, column].item()))
            total = sum(math.exp(gate) for gate, _ in terms)
            assert found[j, channel].item() == pytest.approx(
                sum(math.exp(gate) * value for gate, value in terms) / total, abs=1e-5
            )


def test_entries_go_where_they_are_told():
    pages = torch.zeros(3, 2, 4)
    write_entries(pages, torch.arange(12.0).view(3, 4), torch.tensor([5, 0, 2]))
    assert pages.flatten(0, 1)[[5, 2]].tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]


# ---------------------------------------------------------------------------------------------------------- indexer
def test_the_best_entries_are_chosen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr('specdec.kernels.indexer.ref.GATHERED', 60)  # several portions
    torch.manual_seed(5)
    queries, weights, pages = torch.randn(7, 3, 4), torch.randn(7, 3), torch.randn(4, 5, 4)
    pages[0] = float('nan')
    tables = torch.stack([torch.randperm(15)[:11] + 5 for _ in range(3)])
    entries = Entries(tables, torch.tensor([0, 0, 1, 2, 1, 1, 2]), torch.tensor([0, 1, 3, 4, 5, 10, 11]))
    chosen = choose_entries(queries, weights, pages, entries, 4)
    for t in range(7):
        seen = tables[entries.rows[t], : entries.counts[t]].tolist()
        scores = [
            (weights[t].double() @ (queries[t].double() @ pages.flatten(0, 1)[e].double()).relu()).item() for e in seen
        ]
        best = sorted(range(len(scores)), key=lambda j: -scores[j])[:4]
        assert chosen.flat[chosen.rows[t], : chosen.counts[t]].tolist() == [seen[j] for j in best]


def test_equal_scores_choose_the_earlier_entry():
    entries = Entries(torch.arange(6)[None], torch.tensor([0]), torch.tensor([6]))
    chosen = choose_entries(torch.ones(1, 1, 2), torch.ones(1, 1), torch.ones(1, 6, 2), entries, 3)
    assert chosen.flat.tolist() == [[0, 1, 2]]


# --------------------------------------------------------------------------------------------------- sink attention
@pytest.mark.parametrize('portion', [1 << 25, 50])
def test_attention_with_sinks(portion: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr('specdec.kernels.sink_attention.ref.GATHERED', portion)
    torch.manual_seed(6)
    rows, heads, size, width, extra = 5, 2, 4, 6, 3
    q, fresh, ring = torch.randn(rows, heads, size), torch.randn(rows, size), torch.randn(2, 8, size)
    window = Sources(
        torch.randint(0, rows, (rows, width)),
        torch.randint(0, 16, (rows, width)),
        torch.rand(rows, width) < 0.5,
        torch.rand(rows, width) < 0.7,
    )
    pages = torch.randn(2, 4, size)
    entries = Entries(torch.randint(0, 8, (2, extra)), torch.randint(0, 2, (rows,)), torch.arange(rows) % (extra + 1))
    compressed = Compressed(pages, entries)
    sinks = torch.randn(heads)
    out = sink_attention(q, fresh, ring, window, compressed, sinks, 0.5)
    for t in range(rows):
        keys = [
            ring.flatten(0, 1)[window.places[t, i]] if window.from_ring[t, i] else fresh[window.fresh[t, i]]
            for i in range(width)
            if window.visible[t, i]
        ]
        keys += [pages.flatten(0, 1)[e] for e in entries.flat[entries.rows[t], : entries.counts[t]]]
        for head in range(heads):
            weights = [math.exp(0.5 * (q[t, head].double() @ key.double()).item()) for key in keys]
            total = sum(weights) + math.exp(sinks[head].item())
            wanted = sum((w / total * key.double() for w, key in zip(weights, keys)), torch.zeros(size).double())
            close(out[t, head], wanted)


# ---------------------------------------------------------------------------------------------------------- experts
def test_the_bias_chooses_and_does_not_weigh():
    torch.manual_seed(7)
    logits, bias = torch.randn(9, 6), torch.randn(6)
    weights, experts = route_sqrt_softplus(logits, bias, None, 2, 1.5)
    for t in range(9):
        scores = [math.sqrt(math.log1p(math.exp(value))) for value in logits[t].tolist()]
        best = sorted(range(6), key=lambda e: -(scores[e] + bias[e].item()))[:2]
        assert experts[t].tolist() == best
        total = sum(scores[e] for e in best)
        assert weights[t].tolist() == pytest.approx([1.5 * scores[e] / total for e in best], abs=1e-5)


def test_given_experts_are_weighed_by_their_scores():
    logits, given = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[2, 0]])
    weights, experts = route_sqrt_softplus(logits, None, given, 2, 1.0)
    scores = [math.sqrt(math.log1p(math.exp(value))) for value in (2.0, 0.0)]
    assert experts.tolist() == [[2, 0]]
    assert weights[0].tolist() == pytest.approx([score / sum(scores) for score in scores])


def test_a_limit_clamps_gate_and_up():
    torch.manual_seed(8)
    x, gate_up, down = torch.randn(3, 4), 2 * torch.randn(2, 10, 4), torch.randn(2, 4, 5)
    weights, experts = torch.rand(3, 2), torch.tensor([[0, 1]] * 3)
    found = expert_mlps(x, gate_up, down, weights, experts, limit=0.5)
    for t in range(3):
        total = torch.zeros(4).double()
        for j in range(2):
            gate, up = (gate_up[j].double() @ x[t].double()).chunk(2)
            gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
            total += weights[t, j].double() * (down[j].double() @ (gate * torch.sigmoid(gate) * up))
        close(found[t], total)
