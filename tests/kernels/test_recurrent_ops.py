"""Operators with state by slot: references against the rule itself in fp64, Triton against the references.

Deferred commit is what matters here: however steps are cut, whatever was rejected, and whoever sits out, the state is
that of the accepted rows, one after the other.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.causal_conv1d import ref as conv_ref
from specdec.kernels.gated_delta_rule import DeltaGates, DeltaHeads, DeltaState
from specdec.kernels.gated_delta_rule import ref as delta_ref
from specdec.kernels.gates import ref as gates_ref
from specdec.kernels.state_rows import StateRows

CUDA = torch.cuda.is_available()
DEVICE = torch.device('cuda' if CUDA else 'cpu')
HEADS = DeltaHeads(key_heads=2, value_heads=4, key_dim=8, value_dim=16)
CHANNELS = 2 * HEADS.keys + HEADS.values
WIDTH, MAX_ROWS, SLOTS = 4, 4, 5


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@dataclass
class Text:
    """What one request's tokens bring, all of it, and what the rule says of it in fp64, row by row."""

    x: Tensor
    gates: Tensor

    @classmethod
    def random(cls, length: int, seed: int) -> 'Text':
        return cls(noise(length, CHANNELS, seed=seed), noise(length, 2 * HEADS.value_heads, seed=seed + 1))


WEIGHT = noise(CHANNELS, WIDTH, seed=90) * 0.6
A_LOG, DT_BIAS = noise(HEADS.value_heads, seed=91) - 1, noise(HEADS.value_heads, seed=92)


def convolved(x: Tensor) -> Tensor:
    rows = F.conv1d(x.t()[None].double(), WEIGHT[:, None].double(), padding=WIDTH - 1, groups=CHANNELS)[0]
    return F.silu(rows[:, : len(x)].t())


def rule(x: Tensor, gates: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs [n, HV dv] of convolved rows and the state [HV, dk, dv] behind each, straight from the formulas."""
    state = torch.zeros(HEADS.value_heads, HEADS.key_dim, HEADS.value_dim, dtype=torch.float64, device=x.device)
    outputs, states = [], []
    for row, gate in zip(x.double(), gates.double()):
        q, k, v = row.split((HEADS.keys, HEADS.keys, HEADS.values))
        read = []
        for h in range(HEADS.value_heads):
            keys = slice(h // 2 * HEADS.key_dim, (h // 2 + 1) * HEADS.key_dim)
            unit_q, unit_k = (part[keys] / (part[keys].square().sum() + 1e-6).sqrt() for part in (q, k))
            value = v[h * HEADS.value_dim : (h + 1) * HEADS.value_dim]
            g = -A_LOG[h].double().exp() * F.softplus(gate[HEADS.value_heads + h] + DT_BIAS[h].double())
            state[h] *= g.exp()
            state[h] += torch.outer(unit_k, torch.sigmoid(gate[h]) * (value - unit_k @ state[h]))
            read.append(unit_q @ state[h] / HEADS.key_dim**0.5)
        outputs.append(torch.cat(read))
        states.append(state.clone())
    return torch.stack(outputs), states


class Machine:
    """Slots, run step by step by one implementation; garbage everywhere before the first."""

    def __init__(self, conv, delta, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.conv, self.delta, self.options, self.dtype = conv, delta, options, dtype

        def garbage(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.full(shape, float('nan'), dtype=dtype, device=DEVICE)

        heads = HEADS
        self.windows = garbage(SLOTS, 2, WIDTH - 1 + MAX_ROWS, CHANNELS)
        self.cache = DeltaState(
            garbage(SLOTS, heads.value_heads, heads.key_dim, heads.value_dim, dtype=torch.float32),
            garbage(SLOTS, 2, MAX_ROWS, heads.keys + heads.values),
            garbage(SLOTS, 2, MAX_ROWS, 2 * heads.value_heads, dtype=torch.float32),
        )
        self.parity, self.seen = [1, 0, 1, 0, 1], [0] * SLOTS

    def step(
        self, slots: list[int], contexts: list[int], x: list[Tensor], gates: list[Tensor], chunks: int, padding: int = 0
    ) -> list[Tensor]:
        """Rows of each request, prompt chunks first -> their outputs."""
        counts = [len(rows) for rows in x]
        rows = StateRows(
            slots=torch.tensor(slots, device=DEVICE),
            offsets=torch.tensor([0, *counts], device=DEVICE).cumsum(0),
            pending=torch.tensor([n - self.seen[s] if n else 0 for s, n in zip(slots, contexts)], device=DEVICE),
            parity=torch.tensor([self.parity[s] for s in slots], device=DEVICE),
            fresh=torch.tensor([n == 0 for n in contexts], device=DEVICE),
            chunk_rows=tuple(counts[:chunks]),
        )
        wide = F.pad(torch.cat(x), (3, 5, 0, padding), value=float('inf')).to(self.dtype)  # columns of something wider
        mixed = self.conv.causal_conv1d(wide[:, 3:-5], WEIGHT.to(self.dtype), self.windows, rows)
        source = DeltaGates(F.pad(torch.cat(gates), (0, 0, 0, padding)).to(self.dtype), A_LOG, DT_BIAS)
        out = self.delta.gated_delta_rule(mixed, source, self.cache, HEADS, rows, **self.options)
        assert not out[len(out) - padding :].any(), 'padding rows stay 0'
        for r, (slot, context, count) in enumerate(zip(slots, contexts, counts)):
            self.seen[slot] = context + count if r < chunks else context
            self.parity[slot] = 0 if r < chunks else 1 - self.parity[slot]
        return list(out[: len(out) - padding].split(counts))

    def folded(self, slot: int, length: int) -> Tensor:
        """The slot's state behind `length` tokens, by the operator that exists for that."""
        rows = StateRows(
            torch.tensor([slot], device=DEVICE),
            torch.zeros(2, dtype=torch.int64, device=DEVICE),
            torch.tensor([length - self.seen[slot]], device=DEVICE),
            torch.tensor([self.parity[slot]], device=DEVICE),
            torch.tensor([length == 0], device=DEVICE),
            (),
        )
        copy = replace(self.cache, state=self.cache.state.clone())
        self.delta.fold(copy, HEADS, rows)
        return copy.state[slot]


def implementations() -> list:
    found = [pytest.param((conv_ref, delta_ref, {}), id='ref')]
    try:
        from specdec.kernels.causal_conv1d import triton as conv_triton
        from specdec.kernels.gated_delta_rule import triton as delta_triton
    except ImportError:
        return found
    options = {'one split': {}, 'two splits': {'tile': (8, 4)}}
    return found + [pytest.param((conv_triton, delta_triton, o), id=f'triton, {n}') for n, o in options.items()]


IMPLEMENTATIONS = implementations()


@pytest.mark.parametrize('implementation', IMPLEMENTATIONS)
@pytest.mark.parametrize('accepted', [[1] * 5, [4] * 3, [1, 4, 2, 3]])
def test_state_and_outputs_are_those_of_the_accepted_rows(implementation, accepted: list[int]) -> None:
    conv, delta, options = implementation
    machine, text = Machine(conv, delta, **options), Text.random(66 + sum(accepted), seed=3)
    expected, states = rule(convolved(text.x), text.gates)
    machine.step([2], [0], [text.x[:66]], [text.gates[:66]], chunks=1)
    length = 66
    for i, count in enumerate(accepted):
        wrong = Text.random(MAX_ROWS, seed=50 + i)
        x = torch.cat([text.x[length : length + count], wrong.x[: MAX_ROWS - count]])
        gates = torch.cat([text.gates[length : length + count], wrong.gates[: MAX_ROWS - count]])
        [out] = machine.step([2], [length], [x], [gates], chunks=0, padding=i % 3)
        length += count
        torch.testing.assert_close(out[:count].double(), expected[length - count : length], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(machine.folded(2, length).double(), states[length - 1], rtol=1e-5, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.data())
@pytest.mark.parametrize('implementation', IMPLEMENTATIONS[:1])
def test_any_order_of_steps(implementation, data: st.DataObject) -> None:
    """Requests in any mix of chunks, verify lengths and pauses; a slot is handed on in between."""
    conv, delta, _ = implementation
    machine = Machine(conv, delta)
    texts = {slot: Text.random(60, seed=slot) for slot in (1, 2, 3)}
    lengths = dict.fromkeys(texts, 0)
    outputs: dict[int, list[Tensor]] = {slot: [] for slot in texts}
    for step in range(data.draw(st.integers(2, 9))):
        kinds = {s: data.draw(st.sampled_from(['chunk', 'verify', 'pause'])) for s in texts}
        for s in texts:
            if kinds[s] == 'pause' and data.draw(st.integers(0, 3)) == 0:
                texts[s], lengths[s], outputs[s] = Text.random(60, seed=100 * step + s), 0, []
        chosen = [s for s in texts if kinds[s] == 'chunk'] + [s for s in texts if kinds[s] == 'verify']
        chosen = [s for s in chosen if lengths[s] < 50]
        if not chosen:
            continue
        x, gates, kept = [], [], []
        for s in chosen:
            start, text = lengths[s], texts[s]
            rows = data.draw(st.integers(1, 9 if kinds[s] == 'chunk' else MAX_ROWS))
            keep = rows if kinds[s] == 'chunk' else data.draw(st.integers(1, rows))
            wrong = Text.random(rows, seed=7 * step + s)
            x.append(torch.cat([text.x[start : start + keep], wrong.x[keep:]]))
            gates.append(torch.cat([text.gates[start : start + keep], wrong.gates[keep:]]))
            kept.append(keep)
        chunks = sum(kinds[s] == 'chunk' for s in chosen)
        found = machine.step(chosen, [lengths[s] for s in chosen], x, gates, chunks)
        for s, out, keep in zip(chosen, found, kept):
            outputs[s].append(out[:keep])
            lengths[s] += keep
    for s, text in texts.items():
        if lengths[s]:
            expected, states = rule(convolved(text.x[: lengths[s]]), text.gates[: lengths[s]])
            torch.testing.assert_close(torch.cat(outputs[s]).double(), expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(machine.folded(s, lengths[s]).double(), states[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('implementation', IMPLEMENTATIONS)
def test_rows_do_not_depend_on_how_many_share_a_step(implementation) -> None:
    """Bit for bit: one by one, or all at once with the last ones pending."""
    conv, delta, options = implementation
    text = Text.random(9, seed=8)
    found = []
    for counts in ([1] * 4, [4], [3, 1], [1, 2, 1]):
        machine, length, out = Machine(conv, delta, **options), 1, []
        machine.step([1], [0], [text.x[:1]], [text.gates[:1]], chunks=1)
        for count in counts:
            part = slice(length, length + count)
            out += machine.step([1], [length], [text.x[part]], [text.gates[part]], chunks=0)
            length += count
        found.append((torch.cat(out), machine.folded(1, 5)))
    for out, state in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(state, found[0][1])


@pytest.mark.parametrize('implementation', IMPLEMENTATIONS[1:])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16] if CUDA else [torch.float32])
def test_triton_equals_the_reference(implementation, dtype: torch.dtype) -> None:
    """Ragged requests beside a chunk, one of them new, two slots of padding; everything kept is equal, too."""
    conv, delta, options = implementation
    machines = [Machine(conv_ref, delta_ref, dtype), Machine(conv, delta, dtype, **options)]
    texts = {slot: Text.random(40, seed=slot) for slot in (1, 2, 3, 4)}
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    steps = [
        ([1, 2], [0, 0], [5, 7], 2),
        ([3, 1, 2], [0, 5, 7], [6, 3, 1], 1),
        ([1, 2, 3, 4], [7, 8, 6, 0], [2, 4, 3, 1], 0),
    ]
    for slots, contexts, counts, chunks in steps:
        x = [texts[s].x[n : n + count] for s, n, count in zip(slots, contexts, counts)]
        gates = [texts[s].gates[n : n + count] for s, n, count in zip(slots, contexts, counts)]
        expected, found = (m.step(slots, contexts, x, gates, chunks, padding=2) for m in machines)
        for a, b in zip(found, expected):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    for slot, length in ((1, 9), (2, 10), (3, 7), (4, 1)):
        a, b = (m.folded(slot, length) for m in machines)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_gates() -> None:
    x, gate, weight, residual = noise(5, 48), noise(5, 60, seed=1)[:, 7:55], noise(12, seed=2), noise(5, 48, seed=3)
    normed = gates_ref.gated_rms_norm(x, gate, weight, 1e-6)
    by_hand = x.view(5, 4, 12)
    by_hand = by_hand / (by_hand.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight * F.silu(gate).view(5, 4, 12)
    torch.testing.assert_close(normed, by_hand.view(5, 48))
    column = noise(5, 9, seed=4)[:, 2:3]
    torch.testing.assert_close(gates_ref.sigmoid_gate(x, gate), x * torch.sigmoid(gate))
    torch.testing.assert_close(gates_ref.sigmoid_gate(x, column, residual), residual + x * torch.sigmoid(column))
    triton = pytest.importorskip('specdec.kernels.gates.triton')
    torch.testing.assert_close(triton.gated_rms_norm(x, gate, weight, 1e-6), normed)
    torch.testing.assert_close(triton.sigmoid_gate(x, gate), gates_ref.sigmoid_gate(x, gate))
    torch.testing.assert_close(triton.sigmoid_gate(x, column, residual), gates_ref.sigmoid_gate(x, column, residual))
