"""How drafts are drawn changes how many are accepted, not the text (greedy, coupled) or its law (probabilistic)."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.messages import EngineRequest
from tests.helpers.emulated_gpu import as_on_a_gpu
from tests.helpers.engines import (
    PAGE,
    VOCABULARY,
    Models,
    Settings,
    World,
    drive,
    generate,
    make_engine,
    prompt_ids,
    request,
)
from tests.helpers.exactness import Ledger, reference, survivors
from tests.helpers.statistics import chi_square_p

SAMPLED = {'temperature': 1.0, 'seed': 2**63 + 11}
PROMPT = prompt_ids(2 * PAGE + 1, 5)
DRAFTS = ['dflash_fill_in', 'dspark_vanilla', 'dspark_fill_in_d2t', 'dspark_rnn', 'dspark_confidence_only']


def probabilistic(models: Models) -> Models:
    return replace(models, sources=replace(models.sources, draft_sampling='probabilistic'))


def strangers(count: int) -> list[EngineRequest]:
    dice = random.Random(count)
    return [
        request(
            prompt_ids(dice.randint(1, 25), i),
            dice.randint(3, 30),
            seed=i,
            temperature=dice.choice([0.0, 0.5, 1.0]),
            top_k=dice.choice([0, 9]),
            draft_sampling=dice.choice(['greedy', 'coupled']),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize('kind', ['greedy', 'coupled'])
@pytest.mark.parametrize('draft', DRAFTS)
def test_one_text_under_every_setting(world: World, ledger: Ledger, draft: str, kind: str) -> None:
    """Alone with K = 1 and K = g, in a batch of 16 strangers, after preemption and after a prefix hit."""
    models = world.models(draft)
    expected = ledger.plain(models, PROMPT, 40, **SAMPLED)

    def asked() -> EngineRequest:
        return request(PROMPT, 40, draft_sampling=kind, **SAMPLED)

    for num_drafts in (1, models.proposer.num_drafts):
        [alone] = generate(make_engine(models.with_drafts(num_drafts)), [asked()])
        ledger.same(models, expected, alone)
    engine = make_engine(models, Settings(max_batch_size=17, chunk=24))
    for _ in range(2):  # the second time its prompt is found
        ledger.same(models, expected, generate(engine, [*strangers(16), asked()])[-1])
    driver = drive(make_engine(models))
    once = asked()
    driver.add(once)
    for step in range(12):
        driver.step()
        if step % 4 == 2 and driver.engine.scheduler.running:
            driver.engine.scheduler._preempt(driver.engine.scheduler.running[0])
    ledger.same(models, expected, driver.run()[once.request_id])
    padded = as_on_a_gpu(make_engine(models))
    for outcome in generate(padded, [asked(), *strangers(3)])[:1]:
        ledger.same(models, expected, outcome)


def test_coupled_drafts_of_a_good_draft_are_accepted_more_often(world: World) -> None:
    models = world.models('dspark_vanilla')
    rates = {}
    for kind in ('greedy', 'coupled'):
        asked = [request(prompt_ids(6, i), 40, seed=i, temperature=1.0, draft_sampling=kind) for i in range(24)]
        outcomes = generate(make_engine(models, Settings(max_batch_size=24)), asked)
        rates[kind] = sum(o.accepted for o in outcomes) / sum(len(o.steps) for o in outcomes)
    assert rates['coupled'] > 1.1 * rates['greedy']


# ------------------------------------------------------------------------------------------------ probabilistic
@pytest.mark.parametrize('draft', ['dflash_anchor_first', 'dspark_vanilla', 'dspark_fill_in_d2t'])
def test_law_of_probabilistic_drafts_end_to_end(world: World, draft: str) -> None:
    """Second and third tokens over many seeds, given what came before."""
    models = probabilistic(world.models(draft))
    law: dict[str, Any] = {'temperature': 1.0, 'top_k': 6}
    engine = make_engine(models, Settings(max_batch_size=64, chunk=2048, session_len=32))
    asked = [request(PROMPT, 3, seed=7919 * i, draft_sampling='probabilistic', **law) for i in range(3000)]
    outcomes = generate(engine, asked)
    texts = [tuple(outcome.token_ids) for outcome in outcomes]
    assert any(emitted == 2 for outcome in outcomes for _, emitted in outcome.steps)
    params = asked[0].params
    for length in (1, 2):
        common = Counter(text[:length] for text in texts).most_common(3)
        for prefix, count in common:
            if count < 150:
                continue
            expected, _ = survivors(reference(models, (*PROMPT, *prefix)).logits[-1], params)
            draws = [text[length] for text in texts if text[:length] == prefix]
            assert chi_square_p(draws, expected.exp()) > 1e-3


def test_probabilistic_text_belongs_to_its_seed_and_leaves_neighbours_alone(world: World, ledger: Ledger) -> None:
    models = probabilistic(world.models('dspark_vanilla'))
    asked = {'draft_sampling': 'probabilistic', **SAMPLED}
    [alone] = generate(make_engine(models), [request(PROMPT, 30, **asked)])
    others = strangers(8)
    found = generate(make_engine(models, Settings(max_batch_size=9)), [request(PROMPT, 30, **asked), *others])
    assert found[0].token_ids == alone.token_ids
    assert found[0].steps == alone.steps
    for other in found[1:]:
        p = other.request.params
        settings = {'temperature': p.temperature, 'seed': p.seed, 'top_k': p.top_k}
        ledger.same(models, ledger.plain(models, other.request.prompt_ids, p.max_new_tokens, **settings), other)
    padded = as_on_a_gpu(make_engine(models))
    assert generate(padded, [request(PROMPT, 30, **asked)])[0].token_ids == alone.token_ids


def test_the_distributions_stand_in_the_memory_plan(world: World) -> None:
    models = world.models('dspark_vanilla')
    with_q = make_engine(probabilistic(models)).agent.model.state
    without = make_engine(models).agent.model.state
    assert with_q.draft_probabilities.shape == (5, models.proposer.num_drafts, VOCABULARY)
    assert len(without.draft_probabilities) == 0
    sizes = [type(with_q).bytes_for(5, models.proposer.num_drafts, VOCABULARY, is_kept) for is_kept in (False, True)]
    assert sizes[1] - sizes[0] == with_q.draft_probabilities.numel() * torch.float32.itemsize
