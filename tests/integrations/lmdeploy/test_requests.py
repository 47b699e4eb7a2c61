"""What requests ask for beside text: stops, log-probabilities, grammars. All as LMDeploy's plain decoding does it."""

import re

import pytest

from tests.integrations.lmdeploy.host import Ask, Host, ask

REGEXES = (r'[0-9]{5}(,[0-9]{3}){1,4};', r'(yes|no|maybe){3}', r'\{"a": [1-9]{1,12}\}', r'([a-z]+ ){6}end')


def guided(prompts: list[list[int]]) -> list[Ask]:
    """A grammar each, and a request without one in the same batch."""
    asks = [
        ask(prompt[:40], max_new_tokens=40, response_format={'type': 'regex_schema', 'regex_schema': regex})
        for prompt, regex in zip(prompts, REGEXES)
    ]
    return [*asks, ask(prompts[4][:50], max_new_tokens=40)]


@pytest.mark.parametrize('draft', ['dflash', 'dspark'])
def test_grammars(host: Host, draft: str) -> None:
    asks = guided(host.demo_prompts(5))
    with host.serve('demo', draft, enable_prefix_caching=True) as served:
        outcomes = served.run(asks)
    plain = host.plain('demo', asks)
    assert [o.token_ids for o in outcomes] == [o.token_ids for o in plain]
    assert any(o.finish == 'stop' for o in outcomes)
    for outcome, regex in zip(outcomes, REGEXES):
        assert outcome.finish == 'length' or re.fullmatch(regex, outcome.text)


@pytest.mark.parametrize('draft', ['dflash', 'dspark'])
def test_stops(host: Host, draft: str) -> None:
    prompts = host.demo_prompts(5)
    free = host.plain('demo', [ask(p, max_new_tokens=40) for p in prompts])
    asks = [
        ask(p, max_new_tokens=40, stop_token_ids=[o.token_ids[at], 3], min_new_tokens=least)
        for p, o, at, least in zip(prompts, free, (0, 3, 9, 14, 20), (0, 0, 5, 30, 0))
    ]
    with host.serve('demo', draft) as served:
        outcomes = served.run(asks)
    plain = host.plain('demo', asks)
    assert [(o.token_ids, o.finish) for o in outcomes] == [(o.token_ids, o.finish) for o in plain]
    assert sum(o.finish == 'stop' for o in outcomes) >= 3


@pytest.mark.parametrize('draft', ['dflash', 'dspark'])
def test_logprobs(host: Host, draft: str) -> None:
    asks = [ask(p[: 30 + 9 * n], max_new_tokens=30, logprobs=1 + n) for n, p in enumerate(host.demo_prompts(4))]
    with host.serve('demo', draft, logprobs_mode='raw_logprobs') as served:
        outcomes = served.run(asks)
    for outcome, plain in zip(outcomes, host.plain('demo', asks, logprobs_mode='raw_logprobs')):
        assert outcome.token_ids == plain.token_ids
        assert len(outcome.logprobs) == len(plain.logprobs) == len(plain.token_ids)
        for mine, theirs in zip(outcome.logprobs, plain.logprobs):
            assert mine == pytest.approx(theirs, abs=1e-4)
