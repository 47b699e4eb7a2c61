"""Paged attention against the formula, row by row: chunks, ragged decode rows, windows, page boundaries, garbage."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from specdec.kernels.kv_cache import cache_slots
from specdec.kernels.paged_attention import RowLayout, paged_attention, plan_paged_attention
from specdec.kernels.rotary import rotary_rows
from specdec.layers.rotary import RopeConfig, rotary_table
from tests.kernels import formulas
from tests.kernels.formulas import DTYPES, close

THETA, EPS = 500.0, 1e-6


@dataclass(frozen=True)
class Shape:
    """`chunks`, `decodes`: (committed tokens, rows) of each request."""

    chunks: tuple[tuple[int, int], ...] = ()
    decodes: tuple[tuple[int, int], ...] = ()
    heads: int = 4
    kv: int = 2
    head_dim: int = 6
    page_size: int = 4


SHAPES = {
    'one_row': Shape(decodes=((0, 1),)),
    'one_row_deep': Shape(decodes=((9, 1),)),
    'whole_prompt': Shape(chunks=((0, 9),)),
    'chunk_on_a_boundary': Shape(chunks=((4, 4),)),
    'chunks': Shape(chunks=((0, 5), (7, 3), (0, 1))),
    'equal_decodes': Shape(decodes=((3, 2), (6, 2))),
    'ragged_decodes': Shape(decodes=((3, 1), (8, 4), (0, 2), (15, 3))),
    'mixed': Shape(chunks=((8, 7), (0, 2)), decodes=((11, 3), (1, 1))),
    'no_groups': Shape(chunks=((2, 3),), decodes=((5, 2), (3, 3)), heads=3, kv=3),
    'one_kv_head': Shape(decodes=((5, 2), (4, 1)), heads=5, kv=1),
    'page_of_one': Shape(chunks=((3, 2),), decodes=((6, 2),), page_size=1),
    'large_page': Shape(chunks=((3, 2),), decodes=((30, 5), (2, 1)), page_size=64),
}


def run(shape: Shape, window: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(found, expected), each [T, q * hd]."""
    torch.manual_seed(3)
    requests = [*shape.chunks, *shape.decodes]
    counts = [rows for _, rows in requests]
    width = max(-(-(context + rows) // shape.page_size) for context, rows in requests)
    pages = torch.randperm(len(requests) * width) + 1
    table = pages.view(len(requests), width).to(torch.int32)
    num_pages = int(pages.max()) + 1
    k_pages = torch.randn(num_pages, shape.page_size, shape.kv, shape.head_dim).to(dtype)
    v_pages = torch.randn(num_pages, shape.page_size, shape.kv, shape.head_dim).to(dtype)
    for r, (context, rows) in enumerate(requests):  # entries behind a request's rows are stale and loud
        for p in range(context + rows, width * shape.page_size):
            k_pages[table[r, p // shape.page_size], p % shape.page_size] = 50.0
            v_pages[table[r, p // shape.page_size], p % shape.page_size] = 1e4
    row_requests = torch.tensor([r for r, rows in enumerate(counts) for _ in range(rows)])
    contexts = torch.tensor([context for context, _ in requests])
    positions = torch.cat([torch.arange(rows) for rows in counts]) + contexts[row_requests]
    qkv = torch.randn(sum(counts), (shape.heads + 2 * shape.kv) * shape.head_dim).to(dtype)
    norms = (1 + 0.3 * torch.randn(shape.heads + shape.kv, shape.head_dim)).to(dtype)
    scale = shape.head_dim**-0.5

    _, k, v = formulas.turned_heads(qkv, norms, EPS, shape.kv, positions.tolist(), THETA)
    q = formulas.turned_heads(qkv, norms, EPS, shape.kv, positions.tolist(), THETA)[0]
    expected, first = [], 0
    for r, (context, rows) in enumerate(requests):
        entries = torch.arange(context)
        page, offset = table[r, entries // shape.page_size].long(), entries % shape.page_size
        keys = torch.cat([k_pages[page, offset].double(), k[first : first + rows]])
        values = torch.cat([v_pages[page, offset].double(), v[first : first + rows]])
        for i in range(rows):
            p = context + i
            sees = range(0 if window is None else max(0, p - window + 1), p + 1)
            expected.append(formulas.attend(q[first + i], keys, values, sees.__contains__, scale))
        first += rows

    layout = RowLayout(
        row_offsets=torch.tensor([0, *counts]).cumsum(0),
        contexts=contexts,
        page_table=table,
        chunk_rows=tuple(rows for _, rows in shape.chunks),
        tile_rows=max((rows for _, rows in shape.decodes), default=1),
        page_size=shape.page_size,
    )
    plan = plan_paged_attention(layout, shape.heads // shape.kv, frozenset({None, window}), dtype)
    rotary = rotary_rows(rotary_table(RopeConfig(THETA), shape.head_dim, 80, torch.device('cpu')), positions)
    slots = cache_slots(table, row_requests, positions, shape.page_size)
    out = paged_attention(qkv, norms, EPS, rotary, k_pages, v_pages, slots, plan, window, scale)
    close(k_pages.flatten(0, 1)[slots], k, scale=5)
    close(v_pages.flatten(0, 1)[slots], v)
    return out, torch.stack(expected).flatten(1)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('window', [None, 1, 3, 100])
@pytest.mark.parametrize('name', SHAPES)
def test_against_the_formula(name: str, window: int | None, dtype: torch.dtype) -> None:
    found, expected = run(SHAPES[name], window, dtype)
    assert found.dtype == dtype
    close(found, expected, scale=5)


def test_padding_behind_a_windowed_tile_does_not_leak() -> None:
    """A request with few rows shares a tile with a tall one; its padding rows see nothing at all in a small window."""
    found, expected = run(Shape(decodes=((2, 1), (0, 9))), 2, torch.float32)
    close(found, expected, scale=5)
