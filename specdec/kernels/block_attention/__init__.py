"""Attention of a draft block over [pages | block]: committed context from the cache, the block's own rows dense.

Block rows never enter the cache (DESIGN: the draft's context is a function of the committed prefix only), so the block
is a second input. As with paged attention, what no layer changes is planned once per step.
"""

from typing import Any

from torch import Tensor

from specdec.kernels.dispatch import Implementations

_implementation = Implementations(__name__)


def plan_block_attention(
    contexts: Tensor,
    page_table: Tensor,
    page_size: int,
    block_rows: int,
    heads_per_group: int,
    rules: frozenset[tuple[bool, int | None, bool]],
    dtype: Any,
) -> Any:
    """What `block_attention` needs for every layer of this step; opaque.

    contexts [B]: committed tokens = position of the block's first row; page_table [B, P]; `rules`: the
    (causal, window, anchored) triples that layers will ask for.
    """
    plan = _implementation(contexts.device.type, 'plan_block_attention')
    return plan(contexts, page_table, page_size, block_rows, heads_per_group, rules, dtype)


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    plan: Any,
    rule: tuple[bool, int | None, bool],
    scale: float,
) -> Tensor:
    """q [B, b, heads, hd], block k, v [B, b, kv_heads, hd], pages [N, page, kv_heads, hd] -> [B, b, heads, hd].

    With s the block's start, row i (position s + i) sees key position p if: p < s, or p is a block row and, where
    `causal`, p <= s + i; and, where `window` W is set: |s + i - p| < W, or, where `anchored`, p >= s - W for context
    rows and every block row.
    """
    return _implementation(q.device.type, 'block_attention')(q, k, v, k_pages, v_pages, plan, rule, scale)
