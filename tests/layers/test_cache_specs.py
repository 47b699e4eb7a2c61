"""What a paged cache costs and looks like."""

import torch

from specdec.layers.cache_specs import CacheRoom, PagedSpec


def test_pages() -> None:
    spec = PagedSpec('draft', num_layers=3, kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    cache = spec.allocate(CacheRoom(5, 4, 1), torch.device('cpu'))
    assert len(cache.k) == len(cache.v) == 3
    for pages in (*cache.k, *cache.v):
        assert pages.shape == (5, 4, 2, 8)
        assert pages.dtype == torch.bfloat16
        assert not pages.any(), 'stale NaN would pass through a mask'
    assert len({pages.data_ptr() for pages in (*cache.k, *cache.v)}) == 6
    size = sum(pages.numel() * pages.element_size() for pages in (*cache.k, *cache.v))
    assert size == spec.bytes_per_token * 5 * 4
