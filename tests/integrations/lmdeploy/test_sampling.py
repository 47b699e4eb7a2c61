"""What is drawn: from the target's distribution, filtered on every row, reproducible, with the whole history."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.engines import prompt_ids
from tests.integrations.lmdeploy.host import Ask, Host, Outcome, ask


def sampled(count: int, new: int = 24, **settings: object) -> list[Ask]:
    settings = {'do_sample': True, 'temperature': 0.9, **settings}
    return [
        ask(prompt_ids(5 + n % 40, seed=n), max_new_tokens=new, random_seed=100 + n, **settings) for n in range(count)
    ]


def outside(outcomes: Sequence[Outcome], top: int) -> int:
    """Tokens that are not among the `top` most likely ones, by LMDeploy's own log-probabilities."""
    found = 0
    for outcome in outcomes:
        for token, logprobs in zip(outcome.token_ids, outcome.logprobs):
            better = sum(value > logprobs[token] + 1e-6 for value in logprobs.values())
            found += better >= top
    return found


@pytest.mark.parametrize('draft', ['dflash_fill_in', 'dspark_vanilla'])
def test_top_k_holds_on_every_row(host: Host, draft: str) -> None:
    asks = sampled(12, top_k=2, temperature=2.0, logprobs=2)
    with host.serve('dense', draft, logprobs_mode='raw_logprobs') as served:
        assert outside(served.run(asks), 2) == 0


def test_stock_filters_are_stock(host: Host) -> None:
    """The control: LMDeploy's own verdict accepts drafts that top-k would never draw."""
    asks = sampled(12, top_k=2, temperature=2.0, logprobs=2)
    with host.serve('dense', 'dspark_vanilla', stock=('filters', 'seeds'), logprobs_mode='raw_logprobs') as served:
        assert outside(served.run(asks), 2) > 0
    with host.serve('dense', 'dspark_vanilla', stock=('seeds',), logprobs_mode='raw_logprobs') as served:
        assert outside(served.run(asks), 2) == 0


def test_a_seed_gives_the_same_text_whatever_drafts(host: Host) -> None:
    asks = sampled(10, top_p=0.9, min_p=0.02)
    found = []
    for draft, tokens, engine in (
        ('dspark_vanilla', None, {}),
        ('dspark_vanilla', 2, {'max_batch_size': 2, 'num_gpu_blocks': 22}),
        ('dflash_fill_in', None, {'enable_prefix_caching': True, 'max_prefill_token_num': 32}),
    ):
        with host.serve('dense', draft, tokens, **engine) as served:
            found += [[o.token_ids for o in served.run(asks)] for _ in range(2)]
    assert all(texts == found[0] for texts in found)
    assert len({tuple(ids) for ids in found[0]}) == len(asks)


def test_greedy_and_sampled_requests_share_a_batch(host: Host) -> None:
    greedy = [ask(prompt_ids(n, seed=7), max_new_tokens=20) for n in (4, 9, 30)]
    with host.serve('dense', 'dspark_vanilla') as served:
        mixed = served.run([*sampled(3, top_k=5), *greedy])
        alone = served.run(sampled(3, top_k=5))
    assert [o.token_ids for o in mixed[:3]] == [o.token_ids for o in alone]
    assert [o.token_ids for o in mixed[3:]] == [o.token_ids for o in host.plain('dense', greedy)]


def distance(a: Sequence[int], b: Sequence[int]) -> float:
    """Total variation between two samples."""
    left, right = Counter(a), Counter(b)
    return sum(abs(left[x] / len(a) - right[x] / len(b)) for x in left | right) / 2


@pytest.mark.timeout(240)
def test_1500_requests_are_drawn_as_plain_decoding_draws(host: Host) -> None:
    """Token by token, no further from plain decoding than random splits of both samples from each other."""
    settings = {'max_batch_size': 64, 'num_gpu_blocks': 600, 'session_len': 64}
    prompt, count = prompt_ids(6, seed=11), 1500
    asks = [
        ask(prompt, max_new_tokens=4, random_seed=n, do_sample=True, temperature=1.2, top_p=0.95, ignore_eos=True)
        for n in range(count)
    ]
    with host.serve('dense', 'dspark_vanilla', **settings) as served:
        drafted = served.run(asks)
    plain = host.plain('dense', asks, **settings)
    generator = random.Random(1)
    for position in range(1, 4):
        mine, theirs = ([o.token_ids[position] for o in outcomes] for outcomes in (drafted, plain))
        pooled, floor = [*mine, *theirs], []
        for _ in range(200):
            generator.shuffle(pooled)
            floor.append(distance(pooled[:count], pooled[count:]))
        assert distance(mine, theirs) <= max(floor), position


@torch.no_grad()
def penalised(model: torch.nn.Module, asked: Ask, penalty: float, end: int) -> list[int]:
    """Greedy text with a repetition penalty (Keskar et al., 2019) on everything generated, step by step."""
    ids, made = list(asked.prompt), []
    for _ in range(asked.config().max_new_tokens):
        logits = model(torch.tensor([ids])).logits[0, -1]
        seen = sorted(set(made))
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        token = int(logits.argmax())
        if token == end:
            break
        ids.append(token)
        made.append(token)
    return made


def test_penalties_know_every_token(host: Host) -> None:
    asks = [
        ask(prompt_ids(n, seed=13), max_new_tokens=30, do_sample=True, top_k=1, repetition_penalty=1.4)
        for n in (3, 8, 17, 33, 50, 71)
    ]
    model = AutoModelForCausalLM.from_pretrained(host.target_folder('dense'), dtype=torch.float32)
    expected = [penalised(model, a, 1.4, model.config.eos_token_id) for a in asks]
    for draft in ('dspark_vanilla', 'dflash_fill_in'):
        with host.serve('dense', draft) as served:
            assert [o.token_ids for o in served.run(asks)] == expected
    with host.serve('dense', 'dspark_vanilla', num_gpu_blocks=22, max_prefill_token_num=32) as served:
        assert [o.token_ids for o in served.run(asks)] == expected, 'interrupted requests'
    with host.serve('dense', 'dspark_vanilla', stock=('history',)) as served:
        assert [o.token_ids for o in served.run(asks)] != expected, 'the control: LMDeploy misses tokens'
