"""Writing rows of keys and values into pages."""

import torch
from torch import Tensor

from specdec.kernels.dispatch import Implementations

_implementation = Implementations(__name__, cuda='triton')


def cache_slots(page_table: Tensor, requests: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Flat cache entry of each row: page * page_size + offset -> [T] int64.

    page_table [B, P]; requests [T] (row of the table), positions [T]. Unused table entries are 0, so a position
    without a page lands in the scratch page; positions behind the table's width do too.
    """
    column = positions // page_size
    inside = column < page_table.shape[1]
    page = page_table[requests, column.clamp(max=page_table.shape[1] - 1)].long()
    return torch.where(inside, page, 0) * page_size + positions % page_size


def kv_write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Write rows k, v [T, heads, hd] to entries `slots` [T] of k_pages, v_pages [pages, page, heads, hd].

    Entries of page 0 are scratch: any number of rows may go there, in any order.
    """
    _implementation(k.device.type, 'kv_write')(k, v, k_pages, v_pages, slots)
