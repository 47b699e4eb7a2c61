"""Addresses of rows in pages, and writing to them."""

import pytest
import torch

from specdec.kernels.kv_cache import cache_slots, kv_write

TABLE = torch.tensor([[3, 1, 0], [2, 0, 0]], dtype=torch.int32)


@pytest.mark.parametrize('page_size', [1, 4, 7])
def test_slots_of_positions_with_a_page(page_size: int) -> None:
    positions = torch.arange(2 * page_size)
    slots = cache_slots(TABLE, torch.zeros_like(positions), positions, page_size)
    assert slots.dtype == torch.int64
    expected = [3 * page_size + i for i in range(page_size)] + [page_size + i for i in range(page_size)]
    assert slots.tolist() == expected


def test_rows_of_several_requests() -> None:
    slots = cache_slots(TABLE, torch.tensor([1, 0, 1, 0]), torch.tensor([2, 5, 0, 0]), 4)
    assert slots.tolist() == [2 * 4 + 2, 1 * 4 + 1, 2 * 4, 3 * 4]


@pytest.mark.parametrize('position', [8, 11, 12, 1000])
def test_unused_entries_and_positions_behind_the_table_are_scratch(position: int) -> None:
    slot = cache_slots(TABLE, torch.tensor([0]), torch.tensor([position]), 4)
    assert 0 <= slot.item() < 4


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_kv_write(dtype: torch.dtype) -> None:
    k_pages, v_pages = torch.zeros(4, 3, 2, 5, dtype=dtype), torch.ones(4, 3, 2, 5, dtype=dtype)
    k, v = torch.randn(3, 2, 5).to(dtype), torch.randn(3, 2, 5).to(dtype)
    kv_write(k, v, k_pages, v_pages, torch.tensor([11, 4, 3]))
    expected_k, expected_v = torch.zeros_like(k_pages), torch.ones_like(v_pages)
    for row, (page, offset) in enumerate([(3, 2), (1, 1), (1, 0)]):
        expected_k[page, offset], expected_v[page, offset] = k[row], v[row]
    assert torch.equal(k_pages, expected_k)
    assert torch.equal(v_pages, expected_v)


def test_many_rows_may_share_the_scratch_page() -> None:
    k_pages, v_pages = torch.zeros(2, 2, 1, 1), torch.zeros(2, 2, 1, 1)
    kv_write(torch.ones(5, 1, 1), torch.ones(5, 1, 1), k_pages, v_pages, torch.tensor([0, 0, 1, 0, 2]))
    assert k_pages[1].flatten().tolist() == [1, 0]


def test_rows_need_not_be_contiguous() -> None:
    """Keys and values are slices of one projection."""
    heads = torch.randn(2, 6, 3)
    k_pages, v_pages = torch.zeros(2, 2, 2, 3), torch.zeros(2, 2, 2, 3)
    kv_write(heads[:, 2:4], heads[:, 4:], k_pages, v_pages, torch.tensor([2, 3]))
    assert torch.equal(k_pages[1], heads[:, 2:4])
    assert torch.equal(v_pages[1], heads[:, 4:])
