"""The Triton kernels of DeepSeek-V4 equal their references; without a GPU, under the interpreter."""

import pytest
import torch
from torch import Tensor

from specdec.kernels.compressor import Entries
from specdec.kernels.hyper_connections import MixWeights
from specdec.kernels.hyper_connections import ref as mix_ref
from specdec.kernels.indexer import ref as indexer_ref
from specdec.kernels.ring import Sources
from specdec.kernels.sink_attention import Compressed
from specdec.kernels.sink_attention import ref as attention_ref

pytest.importorskip('triton')

from specdec.kernels.hyper_connections import triton as mix_triton
from specdec.kernels.indexer import triton as indexer_triton
from specdec.kernels.sink_attention import triton as attention_triton
from tests.kernels.test_triton import DEVICE, DTYPES, _poison, close, random

__all__ = ['_poison']


def numbers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(high + sum(shape))).to(DEVICE)


def flags(share: float, *shape: int) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < share).to(DEVICE)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize(
    ('heads', 'size', 'width', 'entries'), [(4, 32, 16, 0), (20, 40, 37, 50), (16, 64, 33, 5), (3, 16, 1, 64)]
)
def test_attention(heads: int, size: int, width: int, entries: int, dtype: torch.dtype) -> None:
    rows = 5
    q, fresh = random(rows, heads, size, dtype=dtype), random(7, size, dtype=dtype)
    ring, pages = random(3, 9, size, dtype=dtype), random(4, 6, size, dtype=dtype)
    ring[2], pages[3] = float('nan'), float('nan')
    window = Sources(
        numbers(0, 7, rows, width), numbers(0, 18, rows, width), flags(0.5, rows, width), flags(0.7, rows, width)
    )
    window.places[~window.visible] = 20  # poisoned, like everything that is not visible
    compressed = None
    if entries:
        tables, counts = numbers(0, 18, 2, entries), numbers(0, entries + 1, rows)
        counts[0], counts[1] = 0, entries
        tables[:, counts.max() :] = 18
        compressed = Compressed(pages, Entries(tables, numbers(0, 2, rows), counts))
    arguments = (q, fresh, ring, window, compressed, random(heads), size**-0.5)
    close(attention_triton.sink_attention(*arguments), attention_ref.sink_attention(*arguments), dtype)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_a_row_attends_alike_whatever_else_is_there(dtype: torch.dtype) -> None:
    """Bit by bit: more rows, and a wider table behind the entries that exist."""
    rows, size, width = 4, 32, 20
    q, fresh, ring, pages = (
        random(*shape, dtype=dtype) for shape in ((rows, 4, size), (5, size), (2, 9, size), (4, 6, size))
    )
    window = Sources(
        numbers(0, 5, rows, width), numbers(0, 18, rows, width), flags(0.5, rows, width), flags(0.7, rows, width)
    )
    tables, counts = numbers(0, 24, 2, 90), torch.tensor([3, 40, 0, 33], device=DEVICE)
    entries = Entries(tables, torch.tensor([0, 1, 1, 0], device=DEVICE), counts)
    together = attention_triton.sink_attention(q, fresh, ring, window, Compressed(pages, entries), random(4), 0.2)
    for t in range(rows):
        one = slice(t, t + 1)
        alone = Sources(window.fresh[one], window.places[one], window.from_ring[one], window.visible[one])
        narrow = Compressed(pages, Entries(tables[:, :41], entries.rows[one], counts[one]))
        found = attention_triton.sink_attention(q[one], fresh, ring, alone, narrow, random(4), 0.2)
        assert torch.equal(found[0], together[t])


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize(('heads', 'size', 'width'), [(16, 16, 30), (5, 24, 70), (64, 128, 130)])
def test_index_scores(heads: int, size: int, width: int, dtype: torch.dtype) -> None:
    rows = 6
    queries, pages = random(rows, heads, size, dtype=dtype), random(5, 8, size, dtype=dtype)
    pages[4] = float('nan')
    counts = numbers(0, width + 1, rows)
    counts[0], counts[1] = 0, width
    tables = numbers(0, 32, 3, width)
    entries = Entries(tables, numbers(0, 3, rows), counts)
    arguments = (queries, random(rows, heads), pages, entries)
    found, wanted = indexer_triton.scores(*arguments), indexer_ref.scores(*arguments)
    assert torch.equal(found == float('-inf'), wanted == float('-inf'))
    visible = wanted.isfinite()
    close(found[visible], wanted[visible], dtype)
    if dtype == torch.float32:
        mine, theirs = (module.choose_entries(*arguments, 9) for module in (indexer_triton, indexer_ref))
        for t, count in enumerate(theirs.counts.tolist()):
            assert mine.flat[t, :count].tolist() == theirs.flat[t, :count].tolist()


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize(('n', 'size'), [(4, 40), (2, 1500)])
def test_hyper_connections(n: int, size: int, dtype: torch.dtype) -> None:
    rows, outputs = 5, (2 + n) * n
    streams, y = random(rows, n, size, dtype=dtype), random(rows, size, dtype=dtype)
    weights = MixWeights(
        random(outputs, n * size) / (n * size) ** 0.5, random(outputs), random(3).abs(), 1e-6, 1e-6, 20
    )
    for found, wanted in zip(mix_triton.collapse(streams, weights), mix_ref.collapse(streams, weights)):
        close(found, wanted, dtype)
    _, post, comb = mix_ref.collapse(streams, weights)
    close(mix_triton.expand(y, streams, post, comb), mix_ref.expand(y, streams, post, comb), dtype)
    head = MixWeights(weights.fn[:n], weights.base[:n], weights.scale[:1], 1e-6, 1e-6, 20)
    close(mix_triton.collapse_head(streams, head), mix_ref.collapse_head(streams, head), dtype)


def test_streams_that_are_views_of_one_row() -> None:
    """As in the first layer, where all streams are the embedding."""
    streams = random(3, 1, 48).expand(-1, 4, -1)
    weights = MixWeights(random(24, 192) / 14, random(24), random(3).abs(), 1e-6, 1e-6, 20)
    for found, wanted in zip(mix_triton.collapse(streams, weights), mix_ref.collapse(streams, weights)):
        close(found, wanted, torch.float32)
