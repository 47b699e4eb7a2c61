"""Rotation with the head norms in front of it."""

import pytest
import torch

from specdec.kernels.rotary import head_norm_rotary, rotary_rows
from specdec.layers.rotary import RopeConfig, rotary_table
from tests.kernels import formulas
from tests.kernels.formulas import DTYPES, close

THETA, EPS = 1000.0, 1e-6


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize(('heads', 'head_dim'), [(1, 2), (3, 6), (5, 20)])
def test_head_norm_rotary(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    positions = [0, 1, 5, 5, 199]
    table = rotary_table(RopeConfig(THETA), head_dim, 200, torch.device('cpu'))
    x = torch.randn(5, heads, head_dim).to(dtype)
    weights = torch.randn(heads, head_dim).to(dtype)
    out = head_norm_rotary(x, weights, EPS, rotary_rows(table, torch.tensor(positions)))
    assert out.dtype == dtype
    for t, position in enumerate(positions):
        for h in range(heads):
            expected = formulas.rotate(formulas.rms_norm(x[t, h], weights[h], EPS), position, THETA)
            close(out[t, h], expected, scale=5)


def test_one_weight_for_all_heads() -> None:
    table = rotary_table(RopeConfig(THETA), 4, 8, torch.device('cpu'))
    rotary = rotary_rows(table, torch.tensor([3, 7]))
    x, weight = torch.randn(2, 3, 4), torch.randn(4)
    same = head_norm_rotary(x, weight.expand(3, 4), EPS, rotary)
    assert torch.equal(head_norm_rotary(x, weight, EPS, rotary), same)


def test_scores_depend_on_distance_only() -> None:
    """What rotation is for: a query at p and a key at p - d give the same product for every p."""
    table = rotary_table(RopeConfig(THETA), 8, 100, torch.device('cpu'))
    q, k, ones = torch.randn(1, 1, 8), torch.randn(1, 1, 8), torch.ones(8)

    def score(p: int) -> float:
        turned = [
            head_norm_rotary(x, ones, EPS, rotary_rows(table, torch.tensor([at]))) for x, at in ((q, p), (k, p - 4))
        ]
        return (turned[0] * turned[1]).sum().item()

    assert score(4) == pytest.approx(score(96), abs=1e-4)
