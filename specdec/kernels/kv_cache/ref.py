"""Page writes in plain torch."""

from torch import Tensor


def kv_write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    k_pages.flatten(0, 1).index_copy_(0, slots, k)
    v_pages.flatten(0, 1).index_copy_(0, slots, v)
