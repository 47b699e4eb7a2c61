import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specdec.errors import CheckpointError
from specdec.layers.weights import Destination
from specdec.models.checkpoint import tensors
from specdec.models.weights import Decision, WeightLoader, listed


def loader(**settings) -> tuple[WeightLoader, dict[str, torch.Tensor]]:
    memory = {'a': torch.zeros(4, 2), 'b': torch.zeros(3)}
    destinations = {name: Destination(view, tuple(view.shape)) for name, view in memory.items()}
    return WeightLoader(destinations, where='the file', **settings), memory


def test_tensors_arrive_in_any_order_over_many_calls():
    weights, memory = loader()
    weights.load([('b', torch.arange(3.0))])
    weights.load(iter([('a', torch.full((4, 2), 7.0, dtype=torch.bfloat16))]))
    weights.finish()
    assert memory['b'].tolist() == [0, 1, 2]
    assert memory['a'].eq(7).all()


@pytest.mark.parametrize(
    ('dim', 'shape', 'expected'),
    [(0, (2, 3), [[3, 4, 5], [6, 7, 8]]), (1, (4, 2), [[1, 2], [4, 5], [7, 8], [10, 11]])],
)
def test_a_rank_takes_its_slice(dim, shape, expected):
    view = torch.zeros(shape)
    weights = WeightLoader({'a': Destination(view, (4, 3), dim, 1)})
    weights.load([('a', torch.arange(12.0).view(4, 3))])
    weights.finish()
    assert view.tolist() == expected


@pytest.mark.parametrize(
    ('pairs', 'message'),
    [
        ([('a', torch.zeros(4, 2))], "tensors='b': missing from the file"),
        ([('a', torch.zeros(4, 2)), ('b', torch.zeros(3)), ('c', torch.zeros(1))], "tensors='c': the file has tensors"),
        ([('a', torch.zeros(2, 4))], 'a=(2, 4): config.json implies shape (4, 2)'),
        ([('a', torch.zeros(4, 2))] * 2, "a='the file': this tensor appears twice"),
    ],
)
def test_every_discrepancy_is_named(pairs, message):
    weights, _ = loader()

    def run() -> None:
        weights.load(pairs)
        weights.finish()

    with pytest.raises(CheckpointError, match=re.escape(message)):
        run()


def test_noise_is_counted_not_refused():
    weights, _ = loader(ignore=(r'rotary\..*',))
    weights.load([('a', torch.zeros(4, 2)), ('b', torch.zeros(3)), ('rotary.inv_freq', torch.zeros(9))])
    weights.finish()
    assert weights.ignored == {'rotary.inv_freq'}


def test_a_decision_sees_its_tensor_and_may_lack_it():
    seen = []
    weights = WeightLoader({'head': Decision((2,), seen.append), 'needed': Decision((1,), seen.append, optional=False)})
    assert weights.missing() == ['needed']
    weights.load([('needed', torch.ones(1)), ('head', torch.zeros(2))])
    weights.finish()
    assert [tensor.shape[0] for tensor in seen] == [1, 2]


def test_long_lists_are_cut():
    assert listed(list('abcdefg')) == 'a, b, c, d, e and 2 more'
    assert listed(['a']) == 'a'


def test_a_rank_reads_its_part_of_a_file(tmp_path: Path) -> None:
    """Rows and columns of sharded tensors, the others whole; a tensor of another shape is read whole, and refused."""
    stored = {'rows': torch.arange(24.0).view(8, 3), 'columns': torch.arange(24.0).view(3, 8), 'whole': torch.ones(3)}
    save_file(stored, tmp_path / 'model.safetensors')
    places = {
        'rows': Destination(torch.zeros(2, 3), (8, 3), 0, 4),
        'columns': Destination(torch.zeros(3, 2), (3, 8), 1, 6),
        'whole': Destination(torch.zeros(3), (3,)),
    }
    loader = WeightLoader(places)
    read = dict(tensors(tmp_path, part=loader.part))
    assert {name: tuple(tensor.shape) for name, tensor in read.items()} == {
        'rows': (2, 3),
        'columns': (3, 2),
        'whole': (3,),
    }
    loader.load(read.items())
    loader.finish()
    assert torch.equal(places['rows'].view, stored['rows'][4:6])
    assert torch.equal(places['columns'].view, stored['columns'][:, 6:])
    wrong = WeightLoader({'rows': Destination(torch.zeros(2, 3), (9, 3), 0, 4)}, ('columns', 'whole'))
    with pytest.raises(CheckpointError, match='implies shape'):
        wrong.load(tensors(tmp_path, part=wrong.part))
