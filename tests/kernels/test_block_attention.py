"""Block attention against the formula, for every rule: who sees whom, and that nothing is written."""

import pytest
import torch
from torch import Tensor

from specdec.kernels.block_attention import Rule, block_attention, plan_block_attention
from specdec.kernels.rotary import rotary_rows
from specdec.layers.rotary import RopeConfig, rotary_table
from tests.kernels import formulas
from tests.kernels.formulas import DTYPES, close

THETA, EPS, HEAD_DIM = 500.0, 1e-6, 6
RULES: dict[str, Rule] = {
    'full': (False, None, False),
    'causal': (True, None, False),
    'sliding': (False, 6, False),
    'sliding_causal': (True, 6, False),
    'smaller_than_block': (False, 3, False),
    'smaller_than_block_causal': (True, 3, False),
    'window_of_one': (True, 1, False),
    'wide': (False, 100, False),
    'anchored': (False, 5, True),
    'anchored_causal': (True, 5, True),
    'anchored_smaller_than_block': (False, 2, True),
}


def visible(rule: Rule, start: int, row: int, p: int) -> bool:
    """Whether block row `row` sees position p, from the contract."""
    causal, window, anchored = rule
    q, in_block = start + row, p >= start
    if in_block and causal and p > q:
        return False
    if window is None:
        return True
    if anchored:
        return in_block or p >= start - window
    return abs(q - p) < window


def run(rule: Rule, contexts: list[int], rows: int, page_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    heads, kv, batch = 4, 2, len(contexts)
    width = -(-max(contexts) // page_size) + 1  # one column more than the context needs
    table = torch.zeros(batch, width, dtype=torch.int32)
    pages = iter((torch.randperm(batch * width) + 1).tolist())
    for r, context in enumerate(contexts):
        for column in range(-(-context // page_size)):
            table[r, column] = next(pages)
    k_pages, v_pages = (torch.randn(batch * width + 1, page_size, kv, HEAD_DIM).to(dtype) for _ in range(2))
    k_pages[0], v_pages[0] = 50.0, 1e4  # scratch is stale and loud, and so is what lies behind each context
    for r, context in enumerate(contexts):
        for p in range(context, -(-context // page_size) * page_size):
            k_pages[table[r, p // page_size], p % page_size] = 50.0
            v_pages[table[r, p // page_size], p % page_size] = 1e4
    qkv = torch.randn(batch * rows, (heads + 2 * kv) * HEAD_DIM).to(dtype)
    norms = (1 + 0.3 * torch.randn(heads + kv, HEAD_DIM)).to(dtype)
    positions = [context + i for context in contexts for i in range(rows)]
    q, k, v = formulas.turned_heads(qkv, norms, EPS, kv, positions, THETA)
    expected = []
    for r, context in enumerate(contexts):
        entries = torch.arange(context)
        page, offset = table[r, entries // page_size].long(), entries % page_size
        own = slice(r * rows, (r + 1) * rows)
        keys = torch.cat([k_pages[page, offset].double(), k[own]])
        values = torch.cat([v_pages[page, offset].double(), v[own]])
        for i in range(rows):

            def sees(p: int, start: int = context, row: int = i) -> bool:
                return visible(rule, start, row, p)

            expected.append(formulas.attend(q[r * rows + i], keys, values, sees, HEAD_DIM**-0.5))

    before = k_pages.clone(), v_pages.clone()
    other: Rule = (True, 4, False)
    plan = plan_block_attention(
        torch.tensor(contexts), table, page_size, rows, heads // kv, frozenset({rule, other}), dtype
    )
    table_rows = rotary_table(RopeConfig(THETA), HEAD_DIM, 80, torch.device('cpu'))
    rotary = rotary_rows(table_rows, torch.tensor(positions))
    out = block_attention(qkv, norms, EPS, rotary, k_pages, v_pages, plan, rule, HEAD_DIM**-0.5)
    assert torch.equal(k_pages, before[0])
    assert torch.equal(v_pages, before[1])
    return out, torch.stack(expected).flatten(1)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('rule', RULES.values(), ids=list(RULES))
@pytest.mark.parametrize(
    ('contexts', 'rows', 'page_size'),
    [([1], 5, 4), ([8], 4, 4), ([3, 12, 1, 8], 5, 4), ([9, 9], 1, 4), ([20, 2], 7, 64)],
    ids=['context_of_one', 'boundary', 'ragged', 'one_row', 'large_page'],
)
def test_against_the_formula(rule: Rule, contexts: list[int], rows: int, page_size: int, dtype: torch.dtype) -> None:
    found, expected = run(rule, contexts, rows, page_size, dtype)
    assert found.dtype == dtype
    close(found, expected, scale=5)
