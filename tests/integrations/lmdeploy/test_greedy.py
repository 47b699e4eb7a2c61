"""Greedy text is LMDeploy's own plain text, token for token, whatever drafts; and trained drafts are accepted."""

from typing import Any

import pytest

from tests.helpers.engines import DRAFTS, prompt_ids
from tests.integrations.lmdeploy.host import Ask, Host, Outcome, ask


def code(host: Host, count: int = 6, **settings: Any) -> list[Ask]:
    """Prompts of different lengths, answers too."""
    prompts = host.demo_prompts(count)
    return [ask(ids[: 30 + 12 * i], max_new_tokens=24 + 7 * i, **settings) for i, ids in enumerate(prompts)]


def mixed(**settings: Any) -> list[Ask]:
    """Requests for the tiny models: one to 119 ids, more of them than run at once."""
    lengths = (1, 2, 5, 9, 15, 16, 17, 31, 33, 48, 64, 90, 119)
    return [ask(prompt_ids(n, seed=3), max_new_tokens=10 + n % 23, ignore_eos=n % 2 == 0, **settings) for n in lengths]


def same(outcomes: list[Outcome], plain: list[Outcome]) -> None:
    assert [(o.token_ids, o.finish, o.text) for o in outcomes] == [(o.token_ids, o.finish, o.text) for o in plain]


@pytest.mark.parametrize('tokens', range(1, 8))
@pytest.mark.parametrize('draft', ['dflash', 'dspark'])
def test_every_number_of_drafts(host: Host, draft: str, tokens: int) -> None:
    asks = code(host)
    with host.serve('demo', draft, tokens) as served:
        outcomes = served.run(asks)
    same(outcomes, host.plain('demo', asks))
    assert served.mean_accepted_length > (1.4, 1.7, 1.9)[min(tokens, 3) - 1], 'trained drafts are accepted'


@pytest.mark.parametrize('draft', DRAFTS)
def test_every_dialect(host: Host, draft: str) -> None:
    with host.serve('dense', draft) as served:
        outcomes = served.run(mixed())
    same(outcomes, host.plain('dense', mixed()))


@pytest.mark.parametrize('draft', ['dflash_fill_in', 'dflash_anchor_first', 'dspark_vanilla', 'dspark_fill_in_d2t'])
def test_experts(host: Host, draft: str) -> None:
    """Qwen3-MoE, whose taps are the plug-in's."""
    with host.serve('moe', draft, max_prefill_token_num=64, enable_prefix_caching=True) as served:
        outcomes = served.run(mixed())
    same(outcomes, host.plain('moe', mixed()))


@pytest.mark.parametrize('draft', ['dflash_fill_in', 'dspark_vanilla'])
@pytest.mark.parametrize(
    'engine',
    [
        pytest.param({'max_prefill_token_num': 32}, id='chunked prompts'),
        pytest.param({'num_gpu_blocks': 22}, id='too few pages'),
        pytest.param({'enable_prefix_caching': True}, id='prefix caching'),
        pytest.param({'enable_prefix_caching': True, 'num_gpu_blocks': 22, 'max_prefill_token_num': 32}, id='all'),
        pytest.param({'max_batch_size': 1}, id='one at a time'),
        pytest.param({'kernel_block_size': 16, 'block_size': 32, 'num_gpu_blocks': 40}, id='pages of two parts'),
        pytest.param({'prefill_interval': 2}, id='prompts often'),
    ],
)
def test_every_kind_of_step(host: Host, draft: str, engine: dict[str, Any]) -> None:
    with host.serve('dense', draft, **engine) as served:
        times = 2 if engine.get('enable_prefix_caching') else 1  # the second time there are prefixes to be found
        outcomes = [served.run(mixed()) for _ in range(times)]
    for found in outcomes:
        same(found, host.plain('dense', mixed()))
