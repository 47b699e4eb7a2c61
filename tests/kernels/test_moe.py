"""Routing and experts against a loop over tokens."""

import pytest
import torch

from specdec.kernels.moe import expert_mlps, route_top_k
from tests.kernels import formulas
from tests.kernels.formulas import DTYPES, close


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('renormalise', [False, True])
@pytest.mark.parametrize(('experts', 'k'), [(1, 1), (5, 2), (8, 8), (9, 3)])
def test_routing(experts: int, k: int, renormalise: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    logits = (3 * torch.randn(11, experts)).to(dtype)
    weights, chosen = route_top_k(logits, k, renormalise)
    assert weights.dtype == torch.float32
    for row, own, ids in zip(logits.double(), weights, chosen.tolist(), strict=True):
        probabilities = (row - row.max()).exp() / (row - row.max()).exp().sum()
        order = sorted(range(experts), key=lambda e: (-row[e].item(), e))[:k]
        assert ids == order
        expected = probabilities[order]
        close(own, expected / expected.sum() if renormalise else expected)


def test_equal_probabilities_choose_the_lower_expert() -> None:
    _, chosen = route_top_k(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [0.0] * 5]), 2, False)
    assert chosen.tolist() == [[1, 2], [0, 1]]


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('tokens', [1, 7])
def test_experts(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    experts, k, size, inner = 5, 3, 9, 7
    x = torch.randn(tokens, size).to(dtype)
    gate_up = (torch.randn(experts, 2 * inner, size) * size**-0.5).to(dtype)
    down = (torch.randn(experts, size, inner) * inner**-0.5).to(dtype)
    weights = torch.rand(tokens, k)
    chosen = torch.stack([torch.randperm(4)[:k] + 1 for _ in range(tokens)])  # nobody wants expert 0
    out = expert_mlps(x, gate_up, down, weights, chosen)
    assert out.dtype == dtype
    for t in range(tokens):
        expected = sum(
            w.double() * (formulas.swiglu(x[t], gate_up[e]) @ down[e].double().T) for w, e in zip(weights[t], chosen[t])
        )
        close(out[t], expected, scale=2)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(7)
    x, gate_up, down = torch.randn(6, 8), torch.randn(4, 10, 8), torch.randn(4, 8, 5)
    weights, chosen = route_top_k(torch.randn(6, 4), 2, True)
    together = expert_mlps(x, gate_up, down, weights, chosen)
    alone = torch.cat(
        [expert_mlps(x[t : t + 1], gate_up, down, weights[t : t + 1], chosen[t : t + 1]) for t in range(6)]
    )
    torch.testing.assert_close(together, alone)
