"""The benchmark measures what it says, on a target small enough for a CPU."""

from dataclasses import replace

import pytest

from benchmark import bench_lmdeploy
from benchmark.shapes import draft_config, target_config


@pytest.mark.parametrize('name', ['plain', 'dflash16of8', 'dspark7'])
def test_a_method_is_measured(name: str) -> None:
    whole = target_config('qwen3-8b')
    small = {'hidden_size': 32, 'num_heads': 4, 'num_kv_heads': 2, 'head_dim': 8, 'intermediate_size': 48}
    target = replace(whole, decoder=replace(whole.decoder, num_layers=9, vocab_size=1100, **small))
    method, draft = bench_lmdeploy.METHODS[name], None
    if method is not None:
        draft = draft_config(target, method.kind, method.block_rows)
        decoder = replace(draft.decoder, vocab_size=1100, head_dim=8)
        draft = replace(draft, decoder=decoder, draft_vocab_size=1100, mask_id=1099)
    rows = bench_lmdeploy.measure(name, target, draft, [1, 2], context=20, steps=20)
    assert [row['batch'] for row in rows] == [1, 2]
    for row in rows:
        assert row['steps'] >= 8
        assert row['step_ms'] > 0
        assert (row['tokens_per_step'] == 1) == (method is None) or 1 <= row['tokens_per_step'] < 2
