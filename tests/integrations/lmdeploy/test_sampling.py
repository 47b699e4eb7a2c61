"""What is drawn: from the target's distribution, filtered on every row, reproducible, with the whole history."""

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


@torch.no_grad()
def law(model: torch.nn.Module, prompt: Sequence[int], banned: int, temperature: float, top_p: float) -> torch.Tensor:
    """The chance of each third token [V] in a sampled continuation, by summing over all first and second ones."""

    def following(texts: torch.Tensor) -> torch.Tensor:
        logits = model(texts).logits[:, -1] / temperature
        logits[:, banned] = float('-inf')
        ordered, ids = logits.softmax(-1).sort(descending=True)
        ordered = torch.where(ordered.cumsum(-1) - ordered > top_p, 0.0, ordered)
        kept = torch.zeros_like(logits).scatter_(1, ids, ordered)
        return kept / kept.sum(-1, keepdim=True)

    text = torch.tensor([list(prompt)])
    first = following(text)[0]
    choices = torch.arange(len(first))[:, None]
    second = following(torch.cat([text.expand(len(first), -1), choices], 1))
    found = torch.zeros_like(first)
    for one in range(len(first)):
        start = torch.cat([text[0], choices[one]])[None].expand(len(first), -1)
        found += first[one] * second[one] @ following(torch.cat([start, choices], 1))
    return found


@pytest.mark.parametrize('draft', ['dspark_vanilla', 'dflash_fill_in'])
def test_1500_requests_follow_the_targets_law(host: Host, draft: str) -> None:
    """The third token of 1500 seeded requests against its exact distribution: chi-square, four deviations of it."""
    prompt, count, temperature, top_p = prompt_ids(6, seed=11), 1500, 1.2, 0.95
    settings = {'do_sample': True, 'temperature': temperature, 'top_p': top_p, 'ignore_eos': True}
    asks = [ask(prompt, max_new_tokens=3, random_seed=n, **settings) for n in range(count)]
    with host.serve('dense', draft, max_batch_size=64, num_gpu_blocks=600, session_len=64) as served:
        tokens = torch.tensor([outcome.token_ids[2] for outcome in served.run(asks)])
    model = AutoModelForCausalLM.from_pretrained(host.target_folder('dense'), dtype=torch.float32)
    expected = count * law(model, prompt, model.config.eos_token_id, temperature, top_p)
    drawn = torch.bincount(tokens, minlength=len(expected)).float()
    assert not drawn[expected == 0].any(), 'a token that the filter cuts everywhere'
    many = expected >= 5
    expected = torch.cat([expected[many], expected[~many].sum()[None]])
    drawn = torch.cat([drawn[many], drawn[~many].sum()[None]])
    kept = expected > 0
    statistic = ((drawn - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = int(kept.sum()) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


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
