"""Every rule acts on every verified row with the history that the row really has: the same text with any draft.

Plain decoding itself is checked row by row against the rules written out (tests/helpers/exactness.py).
"""

import random
from typing import Any

import pytest

from specdec.messages import EngineRequest
from tests.helpers.emulated_gpu import as_on_a_gpu
from tests.helpers.engines import (
    MAX_STEPS,
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
from tests.helpers.exactness import Ledger, reference, ruled, survivors
from tests.helpers.proposers import KnowingProposer, RandomProposer, always, cycling

NEW_TOKENS, G = 30, 4
OPENING, CLOSING = 40, 41
PROMPTS = [prompt_ids(n, 7) for n in (1, 2 * PAGE)] + [(*prompt_ids(9, 8), OPENING, 3)]
STOPS = tuple(range(0, VOCABULARY, 5))
BAD_WORDS = (*((a, b) for a in (21, 36, 37, 39, 47) for b in range(30, 42)), (1, 2, 3), tuple(range(16)))
RULES: dict[str, dict[str, Any]] = {
    'bias': {'logit_bias': ((3, 2.5), (7, -100.0), (11, 4.0))},
    'banned': {'banned_ids': (2, 9, 30)},
    'bad_words': {'bad_words': BAD_WORDS},
    'min_new_tokens': {'min_new_tokens': 12, 'stop_ids': STOPS},
    'allowed': {'allowed_ids': tuple(range(0, VOCABULARY, 3))},
    'repetition': {'repetition_penalty': 1.4},
    'presence': {'presence_penalty': 1.5},
    'frequency': {'frequency_penalty': 0.8},
    'encouraged': {'repetition_penalty': 0.8, 'presence_penalty': -0.5, 'frequency_penalty': -0.2},
    'thinking': {'thinking_budget': 3, 'think_ids': (OPENING, CLOSING), 'logit_bias': ((OPENING, 3.0),)},
}
EVERYTHING = {name: value for rule in RULES.values() for name, value in rule.items()} | {
    'allowed_ids': tuple(range(1, VOCABULARY)),
    'top_k': 20,
    'top_p': 0.95,
    'min_p': 0.01,
}
RULES['everything'] = EVERYTHING
TEMPERATURES = {'greedy': {}, 'sampled': {'temperature': 1.0, 'seed': 2**64 - 7}}


def drafts_of(world: World, ledger: Ledger, kind: str, **params: Any) -> Models:
    plain = world.models()
    if kind == 'random':
        return plain.with_proposer(RandomProposer(VOCABULARY, G))
    if kind in ('good', 'adversarial'):
        texts = [ledger.plain(plain, prompt, NEW_TOKENS, **params).text for prompt in PROMPTS]
        right = cycling([4, 2, 4, 3, 0, 4]) if kind == 'good' else always(0)
        return plain.with_proposer(KnowingProposer(plain.target, G, texts, right, strict=False))
    return world.models(kind)


@pytest.mark.parametrize('temperature', TEMPERATURES)
@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('draft', ['good', 'adversarial', 'random', 'dflash_anchor_first', 'dspark_vanilla'])
def test_rules(world: World, ledger: Ledger, draft: str, rule: str, temperature: str) -> None:
    params = RULES[rule] | TEMPERATURES[temperature]
    models = drafts_of(world, ledger, draft, **params)
    plain = [ledger.plain(models, prompt, NEW_TOKENS, **params) for prompt in PROMPTS]
    drawn = {} if temperature == 'greedy' else {'draft_sampling': 'coupled'}
    engine = make_engine(models, Settings(chunk=7))
    for more in ({}, drawn):
        together = generate(engine, [request(prompt, NEW_TOKENS, **params, **more) for prompt in PROMPTS])
        for expected, outcome in zip(plain, together):
            ledger.same(models, expected, outcome)


def test_the_rules_bite(world: World, ledger: Ledger) -> None:
    """Otherwise the test above would say nothing."""
    models = world.models()
    for temperature in TEMPERATURES.values():
        without = [ledger.plain(models, prompt, NEW_TOKENS, **temperature).token_ids for prompt in PROMPTS]
        for rule, params in RULES.items():
            found = [ledger.plain(models, prompt, NEW_TOKENS, **params, **temperature).token_ids for prompt in PROMPTS]
            assert found != without, rule


def strangers(seed: int, count: int) -> list[EngineRequest]:
    dice = random.Random(seed)
    return [
        request(
            prompt_ids(dice.randint(1, 20), i), dice.randint(2, 30), seed=dice.getrandbits(64),
            max_drafts=dice.choice([None, None, 0, 2]), draft_sampling=dice.choice(['greedy', 'coupled']),
            **dice.choice([{}, *RULES.values()]) | dice.choice([{}, {'temperature': 1.0}, {'temperature': 0.4}]),
        )
        for i in range(count)
    ]  # fmt: skip


def check_each(models: Models, ledger: Ledger, outcomes: Any) -> None:
    names = (
        'temperature', 'top_k', 'top_p', 'min_p', 'seed', 'stop_ids', 'banned_ids', 'bad_words', 'min_new_tokens',
        'allowed_ids', 'repetition_penalty', 'presence_penalty', 'frequency_penalty', 'logit_bias', 'think_ids',
        'thinking_budget',
    )  # fmt: skip
    for outcome in outcomes:
        asked = outcome.request.params
        settings = {name: getattr(asked, name) for name in names}
        expected = ledger.plain(models, outcome.request.prompt_ids, asked.max_new_tokens, **settings)
        ledger.same(models, expected, outcome)


@pytest.mark.parametrize('overlap', [0, 1])
@pytest.mark.parametrize('draft', ['dflash_sliding', 'dspark_fill_in_d2t'])
def test_mixed_batches_and_preemptions(world: World, ledger: Ledger, draft: str, overlap: int) -> None:
    """Each with its own rules, in slots that others just left; counts are restored, the prompt stays the prompt."""
    models, dice = world.models(draft), random.Random(draft)
    driver = drive(make_engine(models, Settings(max_batch_size=6, chunk=16, overlap=overlap)))
    scheduler = driver.engine.scheduler
    for added in strangers(overlap, 30):
        driver.add(added)
    for _ in range(MAX_STEPS):
        driver.step()
        if scheduler.running and dice.random() < 0.25:
            scheduler._preempt(dice.choice(scheduler.running))
        if not driver.engine.has_work():
            break
    assert scheduler.stats.preemptions > 10
    check_each(models, ledger, driver.outcomes.values())


@pytest.mark.parametrize('draft', ['dflash_fill_in', 'dspark_vanilla'])
def test_padded_and_overlapped_as_on_a_gpu(world: World, ledger: Ledger, draft: str) -> None:
    models = world.models(draft)
    engine = as_on_a_gpu(make_engine(models, Settings(chunk=20)))
    check_each(models, ledger, generate(engine, strangers(5, 12), arrivals=[2 * i for i in range(12)]))
    assert engine.agent.eager_decode_steps == 0


@pytest.mark.parametrize('drafted', [False, True])
@pytest.mark.parametrize('min_new_tokens', [0, 5])
def test_no_token_left_ends_in_an_error_that_names_the_rules(world: World, drafted: bool, min_new_tokens: int) -> None:
    models = world.models('dspark_vanilla') if drafted else world.models()
    asked = request(
        PROMPTS[0], 20, allowed_ids=(5,), bad_words=((5, 5, 5),), min_new_tokens=min_new_tokens, stop_ids=(6,)
    )
    engine = make_engine(models)
    outputs = []
    engine.add(asked)
    while engine.has_work():
        outputs += engine.step()
    assert [token for output in outputs for token in output.token_ids] == [5, 5]
    assert outputs[-1].finish_reason == 'error'
    assert outputs[-1].error is not None
    assert outputs[-1].error.code == 'no_token_allowed'
    assert 'allowed_token_ids and bad_words' in outputs[-1].error.message
    assert ('min_new_tokens' in outputs[-1].error.message) == (min_new_tokens > 0)


@pytest.mark.parametrize('draft', [None, 'dflash_fill_in', 'dspark_vanilla'])
def test_processed_logprobs_are_those_of_what_tokens_are_drawn_from(world: World, draft: str | None) -> None:
    models = world.models(draft)
    engine = make_engine(models)
    engine.agent.model.processed_logprobs = True
    for params in (RULES['repetition'] | TEMPERATURES['sampled'], EVERYTHING | TEMPERATURES['sampled'], RULES['bias']):
        [outcome] = generate(engine, [request(PROMPTS[1], 24, logprobs=3, **params)])
        asked, start = outcome.request.params, len(PROMPTS[1])
        whole = reference(models, outcome.text[:-1])
        for i, (token, entry) in enumerate(zip(outcome.token_ids, outcome.logprobs)):
            position = start + i
            scores = ruled(whole.logits[position - 1], outcome.text[:position], start, asked)
            law, cut = (scores.log_softmax(-1), 1.0) if not asked.temperature else survivors(scores, asked)
            if cut < 1e-4:
                continue
            assert next(iter(entry)) == token
            assert all(abs(value - float(law[key])) < 1e-3 or value == float(law[key]) for key, value in entry.items())
