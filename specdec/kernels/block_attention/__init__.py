"""Attention of a draft block over [pages | block]: committed context from the cache, the block's own rows dense.

Block rows never enter the cache (DESIGN: the draft's context is a function of the committed prefix only), so the block
is a second input. As with paged attention, what no layer changes is planned once per step.
"""

from typing import Any

from torch import Tensor

from specdec.kernels.dispatch import Implementations
from specdec.kernels.rotary import Rotary

_implementation = Implementations(__name__, cuda='triton')

Rule = tuple[bool, int | None, bool]  # causal, window, anchored


def plan_block_attention(
    contexts: Tensor,
    page_table: Tensor,
    page_size: int,
    block_rows: int,
    heads_per_group: int,
    rules: frozenset[Rule],
    dtype: Any,
) -> Any:
    """What `block_attention` needs for every layer of this step; opaque.

    contexts [B]: committed tokens = position of the block's first row; page_table [B, P]; `rules`: the
    rules that layers will ask for.
    """
    plan = _implementation(contexts.device.type, 'plan_block_attention')
    return plan(contexts, page_table, page_size, block_rows, heads_per_group, rules, dtype)


def block_attention(
    qkv: Tensor,
    norms: Tensor,
    eps: float,
    rotary: Rotary,
    k_pages: Tensor,
    v_pages: Tensor,
    plan: Any,
    rule: Rule,
    scale: float,
) -> Tensor:
    """qkv [B * b, (q + 2 kv) * hd], norms [q + kv, hd], pages [N, page, kv, hd] -> [B * b, q * hd]; nothing is written.

    With s the block's start, row i (position s + i) sees key position p if: p < s, or p is a block row and, where
    `causal`, p <= s + i; and, where `window` W is set: |s + i - p| < W, or, where `anchored`, p >= s - W for context
    rows and every block row.
    """
    attend = _implementation(qkv.device.type, 'block_attention')
    return attend(qkv, norms, eps, rotary, k_pages, v_pages, plan, rule, scale)
