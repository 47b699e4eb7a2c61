"""The target's embedding and head in a draft: copies are dropped, own ones kept."""

import pytest
import torch
from torch import Tensor

from specdec.layers.embedding import Head, VocabEmbedding
from specdec.layers.parallel import SINGLE
from specdec.layers.weights import Destination
from specdec.models.draft.shared import OwnHead, OwnTable
from specdec.models.weights import Decision

CPU, FP32 = torch.device('cpu'), torch.float32


def embedding_of(weight: Tensor) -> VocabEmbedding:
    shared = VocabEmbedding(*weight.shape, SINGLE, weight.dtype, CPU)
    shared.weight.copy_(weight)
    return shared


def make_table(weight: Tensor) -> OwnTable:
    return OwnTable(embedding_of(weight), *weight.shape, FP32, CPU)


def give(owner: OwnTable | OwnHead, tensor: Tensor) -> None:
    [(_, place)] = owner.weights('x').items()
    assert place.shape == tuple(tensor.shape)
    place.accept(tensor)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_copy_is_judged_in_the_file_dtype(dtype: torch.dtype) -> None:
    weight = torch.randn(6, 4)
    shared = embedding_of(weight)
    assert shared.equals(weight.to(dtype))
    assert not shared.equals(weight.to(dtype) * 1.01)
    assert not shared.equals(weight.to(dtype)[:5])


def test_table() -> None:
    weight, ids = torch.randn(6, 4), torch.tensor([5, 0])
    table = make_table(weight)
    assert torch.equal(table(ids), weight[ids])
    give(table, weight.bfloat16())
    assert table.own is None
    assert torch.equal(table(ids), weight[ids])
    give(table, weight + 1)
    assert torch.equal(table(ids), weight[ids] + 1)


def test_head() -> None:
    weight, hidden = torch.randn(6, 4), torch.randn(3, 4)
    shared = Head(embedding_of(weight))
    head = OwnHead(shared, 6, 4, False, FP32, CPU)
    give(head, weight.clone())
    assert head.head is shared
    give(head, weight * 2)
    torch.testing.assert_close(head(hidden), 2 * shared(hidden))


def test_a_copy_may_be_absent_but_a_reduced_head_may_not() -> None:
    shared = Head(embedding_of(torch.randn(6, 4)))
    [optional] = OwnHead(shared, 6, 4, False, FP32, CPU).weights('lm_head').values()
    assert isinstance(optional, Decision)
    assert optional.optional
    reduced = OwnHead(shared, 3, 4, True, FP32, CPU)
    [required] = reduced.weights('lm_head').values()
    assert isinstance(required, Destination)
    rows = shared.weight[:3].clone()
    required.accept(rows)
    assert reduced.head is not shared, 'equal rows of a larger vocabulary are still another head'
    torch.testing.assert_close(reduced(torch.ones(1, 4)), rows.sum(1)[None])
