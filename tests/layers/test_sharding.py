"""What each rank holds of a checkpoint's tensors, and that the ranks' results add up to the whole."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kernels.linear import linear
from specdec.layers.embedding import VocabEmbedding
from specdec.layers.linear import ColumnLinear, Part, RowLinear
from specdec.layers.moe import ExpertMlps
from specdec.layers.norm import RmsNorm
from specdec.layers.parallel import SINGLE, ParallelGroup
from specdec.layers.weights import Destination

CPU, FP32 = torch.device('cpu'), torch.float32


class Rank(ParallelGroup):
    """One rank whose sums the test adds up."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


def ranks(size: int) -> list[ParallelGroup]:
    return [SINGLE] if size == 1 else [Rank(r, size) for r in range(size)]


def fill(destinations: Mapping[str, Destination], tensors: dict[str, Tensor]) -> None:
    assert destinations.keys() == tensors.keys()
    for name, destination in destinations.items():
        assert destination.shape == tuple(tensors[name].shape)
        destination.accept(tensors[name])


@pytest.mark.parametrize('size', [1, 2, 4])
@pytest.mark.parametrize('bias', [False, True])
def test_fused_columns(size: int, bias: bool) -> None:
    """q has 8 rows in heads of 2, k and v 4 in heads of 1: every rank gets its heads of each, side by side."""
    torch.manual_seed(0)
    tensors = {f'{n}.weight': torch.randn(rows, 5) for n, rows in (('q', 8), ('k', 4), ('v', 4))}
    if bias:
        tensors |= {f'{n}.bias': torch.randn(rows) for n, rows in (('q', 8), ('k', 4), ('v', 4))}
    x = torch.randn(3, 5)
    for group in ranks(size):
        parts = (Part.of(8, group, 2), Part.of(4, group), Part.of(4, group))
        layer = ColumnLinear(5, parts, bias, FP32, CPU)
        fill(layer.weights('q', 'k', 'v'), tensors)
        found = linear(x, layer.weight, layer.bias)
        expected = []
        for name, rows in (('q', 8), ('k', 4), ('v', 4)):
            count = rows // size
            mine = slice(group.rank * count, (group.rank + 1) * count)
            own_bias = tensors[f'{name}.bias'][mine] if bias else None
            expected.append(linear(x, tensors[f'{name}.weight'][mine], own_bias))
        torch.testing.assert_close(found, torch.cat(expected, -1))


@pytest.mark.parametrize('size', [1, 2, 3])
@pytest.mark.parametrize('bias', [False, True])
def test_rows_add_up_with_residual_and_bias_once(size: int, bias: bool) -> None:
    torch.manual_seed(1)
    tensors = {'o.weight': torch.randn(4, 6)} | ({'o.bias': torch.randn(4)} if bias else {})
    x, residual = torch.randn(3, 6), torch.randn(3, 4)
    total = torch.zeros(3, 4)
    for group in ranks(size):
        part = Part.of(6, group)
        layer = RowLinear(part, 4, bias, group, FP32, CPU)
        fill(layer.weights('o'), tensors)
        total += layer(x[:, part.start : part.start + part.count], residual)
    torch.testing.assert_close(total, residual + linear(x, tensors['o.weight'], tensors.get('o.bias')))


@pytest.mark.parametrize('size', [1, 2, 5])
def test_vocabulary_rows_add_up(size: int) -> None:
    table, ids, total = torch.randn(10, 3), torch.tensor([[0, 9, 4], [5, 5, 1]]), torch.zeros(2, 3, 3)
    for group in ranks(size):
        embedding = VocabEmbedding(10, 3, group, FP32, CPU)
        fill(embedding.weights('e'), {'e.weight': table})
        total += embedding(ids)
    assert torch.equal(total, table[ids])


@pytest.mark.parametrize('size', [1, 2])
def test_experts_add_up(size: int) -> None:
    torch.manual_seed(2)
    experts, hidden, inner = 3, 6, 4
    tensors = {'m.gate.weight': torch.randn(experts, hidden)}
    for e in range(experts):
        tensors |= {f'm.experts.{e}.{n}_proj.weight': torch.randn(inner, hidden) for n in ('gate', 'up')}
        tensors[f'm.experts.{e}.down_proj.weight'] = torch.randn(hidden, inner)
    norm = RmsNorm(hidden, 1e-6, FP32, CPU)
    norm.weight.copy_(torch.rand(hidden))
    residual = torch.randn(5, hidden)

    def shares(size: int) -> Any:
        total = torch.zeros(5, hidden)
        for group in ranks(size):
            layer = ExpertMlps(hidden, experts, 2, inner, True, group, FP32, CPU)
            fill(layer.weights('m'), tensors)
            total += layer(residual, norm) - residual
        return total

    torch.testing.assert_close(shares(size), shares(1), atol=1e-5, rtol=1e-5)


def test_destination_takes_other_dtypes() -> None:
    view = torch.zeros(2, 3, dtype=torch.bfloat16)
    source = torch.arange(12.0).view(4, 3)
    Destination(view, (4, 3), 0, 2).accept(source)
    assert view.tolist() == source[2:].tolist()
