"""The Markov chain against its formulas, one request and one token at a time."""

import dataclasses

import pytest
import torch
from torch import Tensor

from specdec.kernels.markov import MarkovWeights, markov_chain
from tests.kernels.formulas import DTYPES

V, SIZE, RANK, STEPS = 23, 10, 3, 4
KINDS = ['vanilla', 'gated', 'rnn']


def make_weights(kind: str, reduced: bool, dtype: torch.dtype) -> MarkovWeights:
    rows = 9 if reduced else V
    kept = torch.randperm(V)[:rows].sort().values

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    return MarkovWeights(
        w1=random(V, RANK),
        w2=random(rows, RANK),
        kind=kind,
        gate=random(RANK, SIZE + RANK) if kind == 'gated' else None,
        gate_bias=random(RANK) if kind == 'gated' else None,
        joint=random(3 * RANK, 2 * RANK + SIZE) if kind == 'rnn' else None,
        joint_bias=random(3 * RANK) if kind == 'rnn' else None,
        d2t=kept - torch.arange(rows) if reduced else None,
    )


def bias(weights: MarkovWeights, state: Tensor, token: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Bias on the logits after `token`, and the rnn's next state, in double precision."""
    e, hidden, w2 = weights.w1[token].double(), hidden.double(), weights.w2.double()
    if weights.kind == 'vanilla':
        return w2 @ e, state
    if weights.kind == 'gated':
        assert weights.gate is not None
        assert weights.gate_bias is not None
        gate = weights.gate.double() @ torch.cat([hidden, e]) + weights.gate_bias.double()
        return w2 @ (gate.sigmoid() * e), state
    assert weights.joint is not None
    assert weights.joint_bias is not None
    y = weights.joint.double() @ torch.cat([state, e, hidden]) + weights.joint_bias.double()
    gate, candidate, output = y[:RANK].sigmoid(), y[RANK : 2 * RANK].tanh(), y[2 * RANK :].tanh()
    return w2 @ output, gate * state + (1 - gate) * candidate


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('fill_in', [False, True])
@pytest.mark.parametrize('reduced', [False, True])
@pytest.mark.parametrize('kind', KINDS)
def test_chain(kind: str, reduced: bool, fill_in: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(8)
    weights = make_weights(kind, reduced, dtype)
    base, hidden = torch.randn(3, STEPS, weights.w2.shape[0]), torch.randn(3, STEPS, SIZE).to(dtype)
    lead = torch.randn(3, SIZE).to(dtype) if fill_in else None
    anchors = torch.tensor([0, 7, V - 1])
    seen: list[Tensor] = []

    def pick(k: int, logits: Tensor) -> Tensor:
        assert k == len(seen)
        seen.append(logits)
        return logits.argmax(-1)

    tokens, previous = markov_chain(base, hidden, lead, anchors, weights, pick)
    unpicked, _ = markov_chain(base, hidden, lead, anchors, weights)
    assert torch.equal(tokens, unpicked)
    assert torch.equal(previous, torch.cat([anchors[:, None], tokens[:, :-1]], 1))
    for r in range(3):
        state, token = torch.zeros(RANK).double(), int(anchors[r])
        if lead is not None:
            _, state = bias(weights, state, token, lead[r])
        for k in range(STEPS):
            added, state = bias(weights, state, token, hidden[r, k])
            assert seen[k].dtype == torch.float32
            difference = (seen[k][r].double() - base[r, k].double() - added).abs().max()
            assert difference < (2e-5 if dtype == torch.float32 else 0.25)
            chosen = int(seen[k][r].argmax())
            token = chosen if weights.d2t is None else chosen + int(weights.d2t[chosen])
            assert int(tokens[r, k]) == token


def test_lead_row_moves_only_an_rnn() -> None:
    torch.manual_seed(9)
    base, hidden, lead = torch.randn(2, STEPS, V), torch.randn(2, STEPS, SIZE), torch.randn(2, SIZE)
    anchors = torch.tensor([1, 2])
    for kind in KINDS:
        weights, seen = make_weights(kind, False, torch.float32), []

        def pick(_k: int, logits: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(logits)
            return anchors  # the same tokens either way, so that only the state can differ

        markov_chain(base, hidden, None, anchors, weights, pick)
        markov_chain(base, hidden, lead, anchors, weights, pick)
        without, with_lead = torch.stack(seen[:STEPS]), torch.stack(seen[STEPS:])
        assert torch.equal(without, with_lead) == (kind != 'rnn')


def test_reduced_ids_feed_the_chain_as_target_ids() -> None:
    """w1 is read at the target id: draft id 0 stands for target id 5 here, whose row forces draft id 1."""
    w1, w2 = torch.zeros(8, 1), torch.tensor([[0.0], [1.0]])
    w1[5] = 10.0
    weights = MarkovWeights(w1, w2, 'vanilla', d2t=torch.tensor([5, 5]))
    base = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    tokens, previous = markov_chain(base, torch.zeros(1, 2, 4), None, torch.tensor([3]), weights)
    assert tokens.tolist() == [[5, 6]]
    assert previous.tolist() == [[3, 5]]


def test_equal_logits_take_the_lower_id() -> None:
    weights = dataclasses.replace(make_weights('vanilla', False, torch.float32), w1=torch.zeros(V, RANK))
    tokens, _ = markov_chain(torch.ones(1, 2, V), torch.zeros(1, 2, SIZE), None, torch.tensor([3]), weights)
    assert tokens.tolist() == [[0, 0]]
