"""Sampled text is a function of request and seed: drafts, company, preemption and prefix hits leave it alone."""

import random
from collections import Counter
from typing import Any

import pytest
import torch

from specdec.messages import EngineRequest
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
from tests.helpers.exactness import Ledger, reference, survivors
from tests.helpers.proposers import KnowingProposer, RandomProposer, always, cycling
from tests.helpers.statistics import chi_square_p

NEW_TOKENS = 30
G = 4
FILTERS: dict[str, dict[str, Any]] = {
    'none': {},
    'top_k': {'top_k': 5},
    'top_p': {'top_p': 0.8},
    'min_p': {'min_p': 0.1},
    'all': {'top_k': 8, 'top_p': 0.9, 'min_p': 0.05},
}
PROMPTS = [prompt_ids(n, 7) for n in (1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1)]


def strangers(seed: int, count: int = 6) -> list[EngineRequest]:
    """Requests with settings of their own: every filter, greedy ones, other caps, other seeds."""
    dice = random.Random(seed)
    kinds = [{'temperature': t} | f for t in (0.3, 1.0) for f in FILTERS.values()] + [{}]
    return [
        request(prompt_ids(dice.randint(1, 20), i), dice.randint(2, 25), seed=dice.getrandbits(64),
                max_drafts=dice.choice([None, 0, 2]), **dice.choice(kinds))
        for i in range(count)
    ]  # fmt: skip


def drafts_of(world: World, ledger: Ledger, kind: str, **params: Any) -> Models:
    plain = world.models()
    if kind == 'random':
        return plain.with_proposer(RandomProposer(VOCABULARY, G))
    if kind in ('good', 'adversarial'):
        texts = [ledger.plain(plain, prompt, NEW_TOKENS, **params).text for prompt in PROMPTS]
        right = cycling([4, 2, 4, 3, 0, 4]) if kind == 'good' else always(0)
        return plain.with_proposer(KnowingProposer(plain.target, G, texts, right))
    return world.models(kind)


DRAFTS = ['good', 'adversarial', 'random', 'dflash_anchor_first', 'dspark_vanilla']
MATRIX = [
    pytest.param(draft, filters, marks=[] if draft in DRAFTS[:2] or filters in ('none', 'all') else pytest.mark.slow)
    for draft in DRAFTS
    for filters in FILTERS
]


@pytest.mark.parametrize('temperature', [0.3, 1.0])
@pytest.mark.parametrize(('draft', 'filters'), MATRIX)
def test_text_for_a_seed(world: World, ledger: Ledger, draft: str, filters: str, temperature: float) -> None:
    params = {'temperature': temperature, 'seed': 2**64 - 5, **FILTERS[filters]}
    models = drafts_of(world, ledger, draft, **params)
    plain = [ledger.plain(models, prompt, NEW_TOKENS, **params) for prompt in PROMPTS]
    for prompt, expected in zip(PROMPTS, plain):
        [alone] = generate(make_engine(models), [request(prompt, NEW_TOKENS, **params)])
        ledger.same(models, expected, alone)
    engine = make_engine(models, Settings(chunk=7))
    for _ in range(2):  # cold, then with prefix hits
        together = generate(engine, [request(prompt, NEW_TOKENS, **params) for prompt in PROMPTS])
        for expected, outcome in zip(plain, together):
            ledger.same(models, expected, outcome)


@pytest.mark.parametrize('overlap', [0, 1])
@pytest.mark.parametrize('draft', ['dflash_sliding', 'dspark_fill_in_rnn', 'random'])
def test_among_strangers_and_preempted(world: World, ledger: Ledger, draft: str, overlap: int) -> None:
    """All filters and temperatures in one batch, with preemptions between any two steps."""
    models, dice = drafts_of(world, ledger, draft), random.Random(draft)
    requests = [r for seed in range(3) for r in strangers(seed, 8)]
    driver = drive(make_engine(models, Settings(max_batch_size=8, chunk=16, overlap=overlap)))
    scheduler = driver.engine.scheduler
    for added in requests:
        driver.add(added)
    for _ in range(MAX_STEPS):
        driver.step()
        if scheduler.running and dice.random() < 0.3:
            scheduler._preempt(dice.choice(scheduler.running))
        if not driver.engine.has_work():
            break
    assert scheduler.stats.preemptions > 10
    check_each(models, ledger, driver.outcomes.values())


def check_each(models: Models, ledger: Ledger, outcomes: Any) -> None:
    for outcome in outcomes:
        asked = outcome.request.params
        names = ('temperature', 'top_k', 'top_p', 'min_p', 'seed')
        settings = {name: getattr(asked, name) for name in names}
        expected = ledger.plain(models, outcome.request.prompt_ids, asked.max_new_tokens, **settings)
        ledger.same(models, expected, outcome)


@pytest.mark.slow
@pytest.mark.parametrize('draft', ['dflash_fill_in', 'dspark_gated', 'dspark_fill_in_d2t'])
def test_many_strangers(world: World, ledger: Ledger, draft: str) -> None:
    models = world.models(draft)
    for seed in range(10, 14):
        requests = strangers(seed, 32)
        small = Settings(max_batch_size=16, chunk=16, num_pages=40, overlap=seed % 2)
        found = generate(make_engine(models, small), requests, [(3 * i) % 40 for i in range(32)])
        check_each(models, ledger, found)


def test_one_seed_in_two_places_and_greedy_neighbours(world: World, ledger: Ledger) -> None:
    models = world.models('dspark_vanilla')
    prompt = PROMPTS[2]
    kinds = [{'temperature': 1.0, 'seed': 3}, {}, {'temperature': 1.0, 'seed': 4}, {'temperature': 1.0, 'seed': 3}, {}]
    found = generate(
        make_engine(models, Settings(max_batch_size=5, prefix_caching=False)),
        [request(prompt, NEW_TOKENS, **kind) for kind in kinds],
    )
    for kind, outcome in zip(kinds, found):
        ledger.same(models, ledger.plain(models, prompt, NEW_TOKENS, **kind), outcome)
    texts = [tuple(outcome.token_ids) for outcome in found]
    assert texts[0] == texts[3] != texts[2]
    assert texts[1] == texts[4]


@pytest.mark.parametrize('filters', FILTERS)
def test_without_filters_of_its_own_a_request_is_not_filtered_with_others(
    world: World, ledger: Ledger, filters: str
) -> None:
    """Stages run for the whole batch; they must leave alone whoever did not ask for them."""
    models = world.models('dspark_vanilla')
    params = {'temperature': 1.0, 'seed': 11}
    others = [request(prompt_ids(5), 40, temperature=0.5, seed=1, **FILTERS[filters]) for _ in range(2)]
    found = generate(make_engine(models), [others[0], request(PROMPTS[1], 30, **params), others[1]])
    ledger.same(models, ledger.plain(models, PROMPTS[1], 30, **params), found[1])


# ------------------------------------------------------------------------------------- the target's distribution
LAW = {'temperature': 0.9, 'top_k': 12, 'top_p': 0.95, 'min_p': 0.02}
NUM_SEEDS = 3000


@pytest.fixture(scope='module')
def second_tokens(world: World) -> dict[str, list[tuple[int, int]]]:
    """First and second tokens over many seeds, from an engine whose draft is good, and from one that always errs."""
    plain, prompt = world.models(), PROMPTS[3]
    whole = reference(plain, prompt)
    first = int(whole.logits[-1].argmax())
    second = int(reference(plain, (*prompt, first)).logits[-1].argmax())
    found = {}
    for name, guess in (('likely', second), ('unlikely', (second + 1) % VOCABULARY)):
        models = plain.with_proposer(_Constant(guess))
        engine = make_engine(models, Settings(max_batch_size=64, chunk=2048, session_len=32))
        outcomes = generate(engine, [request(prompt, 3, seed=7919 * i, **LAW) for i in range(NUM_SEEDS)])
        found[name] = [tuple(outcome.token_ids[:2]) for outcome in outcomes]
        steps = [step for outcome in outcomes for step in outcome.steps]
        assert any(emitted > 1 for _, emitted in steps) or name == 'unlikely'
    return found


class _Constant(RandomProposer):
    """Proposes one id everywhere."""

    def __init__(self, guess: int) -> None:
        super().__init__(VOCABULARY, 1)
        self._table = torch.full_like(self._table, guess)


@pytest.mark.parametrize('draft', ['likely', 'unlikely'])
def test_law_of_first_and_second_token(
    world: World, second_tokens: dict[str, list[tuple[int, int]]], draft: str
) -> None:
    models, prompt, pairs = world.models(), PROMPTS[3], second_tokens[draft]
    asked = request(prompt, 3, **LAW).params
    law, _ = survivors(reference(models, prompt).logits[-1], asked)
    assert chi_square_p([first for first, _ in pairs], law.exp()) > 1e-3
    common = Counter(first for first, _ in pairs).most_common(3)
    assert common[-1][1] > 100
    for first, _ in common:
        law, _ = survivors(reference(models, (*prompt, first)).logits[-1], asked)
        assert chi_square_p([second for one, second in pairs if one == first], law.exp()) > 1e-3


def test_both_drafts_gave_the_same_tokens(second_tokens: dict[str, list[tuple[int, int]]]) -> None:
    assert second_tokens['likely'] == second_tokens['unlikely']
