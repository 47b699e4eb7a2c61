"""Greedy text with drafts is the target's own text, token for token, whatever draft, K, chunks, pages or company."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.messages import EngineRequest
from tests.helpers.engines import (
    DRAFTS,
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
from tests.helpers.exactness import Ledger
from tests.helpers.proposers import KnowingProposer, RandomProposer, always, cycling

G = 4  # proposals of every draft in DRAFTS
PROMPT_LENGTHS = (1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1)
CHUNKS = (7, 512)
NEW_TOKENS = 30


def check_all(models: Models, ledger: Ledger, engine_settings: Settings, lengths=PROMPT_LENGTHS, seed=0, **params):
    """Run prompts of these lengths together; every text equals plain decoding's. Returns the outcomes."""
    prompts = [prompt_ids(n, seed) for n in lengths]
    driver = drive(make_engine(models, engine_settings))
    found = generate(driver, [request(p, NEW_TOKENS, **params) for p in prompts])
    for prompt, outcome in zip(prompts, found):
        ledger.same(models, ledger.plain(models, prompt, NEW_TOKENS, **params), outcome)
    return found


def knowing(models: Models, ledger: Ledger, prompts, num_drafts, right, new_tokens=NEW_TOKENS, **params) -> Models:
    """The target with a draft that knows the plain texts of these prompts."""
    texts = [ledger.plain(models, p, new_tokens, **params).text for p in prompts]
    return models.with_proposer(KnowingProposer(models.target, num_drafts, texts, right))


# ------------------------------------------------------------------------------------------------ real drafts
@pytest.mark.parametrize('draft', DRAFTS)
@pytest.mark.parametrize('num_drafts', [1, 2, G - 1, G])
def test_every_draft_and_k(world: World, ledger: Ledger, draft: str, num_drafts: int) -> None:
    models = world.models(draft, num_drafts)
    for chunk in CHUNKS:
        found = check_all(models, ledger, Settings(chunk=chunk))
        assert all(drafted <= num_drafts for outcome in found for drafted, _ in outcome.steps)


@pytest.mark.parametrize('draft', ['dspark_vanilla', 'dflash_sliding', 'dspark_fill_in_d2t'])
def test_the_drafts_of_these_tests_are_neither_always_right_nor_always_wrong(world: World, draft: str) -> None:
    [outcome] = generate(make_engine(world.models(draft)), [request(prompt_ids(9), 80)])
    assert {emitted for _, emitted in outcome.steps} >= {1, 2}
    assert outcome.accepted < sum(drafted for drafted, _ in outcome.steps)


@pytest.mark.parametrize('target', ['sliding', 'moe'])
@pytest.mark.parametrize('draft', ['dflash_sliding', 'dspark_rnn'])
def test_other_targets(world: World, ledger: Ledger, target: str, draft: str) -> None:
    for chunk in CHUNKS:
        check_all(world.models(draft, target=target), ledger, Settings(chunk=chunk))


@pytest.mark.parametrize('overlap', [0, 1])
@pytest.mark.parametrize('draft', ['dflash_fill_in', 'dspark_gated'])
def test_prefix_hit(world: World, ledger: Ledger, draft: str, overlap: int) -> None:
    models = world.models(draft)
    engine = make_engine(models, Settings(overlap=overlap))
    for repeat in range(3):
        for length in PROMPT_LENGTHS:
            prompt = prompt_ids(length)
            [outcome] = generate(engine, [request(prompt, NEW_TOKENS)])
            ledger.same(models, ledger.plain(models, prompt, NEW_TOKENS), outcome)
            assert outcome.cached == [(length - 1) // PAGE * PAGE if repeat else 0]


@pytest.mark.parametrize('overlap', [0, 1])
@pytest.mark.parametrize('draft', ['dflash_anchor_first', 'dspark_vanilla'])
@pytest.mark.parametrize('caching', [True, False])
def test_preempted(world: World, ledger: Ledger, draft: str, caching: bool, overlap: int) -> None:
    """Pages for two requests, and eight of them that all want to grow."""
    models, new_tokens = world.models(draft), 40
    prompts = [prompt_ids(n, 3) for n in (1, 3, 4, 5, 7, 8, 9, 11)]
    pages = 2 * -(-(11 + new_tokens) // PAGE)
    small = Settings(
        num_pages=pages, session_len=60, max_batch_size=8, chunk=7, prefix_caching=caching, overlap=overlap
    )
    driver = drive(make_engine(models, small))
    found = generate(driver, [request(p, new_tokens) for p in prompts])
    for prompt, outcome in zip(prompts, found):
        ledger.same(models, ledger.plain(models, prompt, new_tokens), outcome)
    assert driver.engine.scheduler.stats.preemptions >= 5
    assert sum(outcome.firsts for outcome in found) > len(prompts)


@pytest.mark.parametrize('overlap', [0, 1])
@pytest.mark.parametrize('draft', ['dflash_sliding', 'dspark_fill_in_rnn'])
def test_preempted_hundreds_of_times(world: World, ledger: Ledger, draft: str, overlap: int) -> None:
    """Somebody loses slot and pages between any two steps, in whatever phase it is."""
    models, dice = world.models(draft), random.Random(5)
    prompts = [prompt_ids(n, 3) for n in (1, 4, 5, 8, 9, 21)]
    for caching in (True, False):
        driver = drive(
            make_engine(models, Settings(max_batch_size=6, chunk=32, prefix_caching=caching, overlap=overlap))
        )
        requests = [request(p, NEW_TOKENS) for p in 4 * prompts]
        for added in requests:
            driver.add(added)
        scheduler = driver.engine.scheduler
        for _ in range(MAX_STEPS):
            driver.step()
            if scheduler.running and dice.random() < 0.5:
                scheduler._preempt(dice.choice(scheduler.running))
            if not driver.engine.has_work():
                break
        for prompt, asked in zip(4 * prompts, requests):
            ledger.same(models, ledger.plain(models, prompt, NEW_TOKENS), driver.outcomes[asked.request_id])
        scheduler.check()
        assert scheduler.stats.preemptions >= 50


def ragged(count: int, seed: int) -> list[EngineRequest]:
    """Requests that differ in everything that may differ within a batch; one cap in three is below K, one is 0."""
    caps = [None, 0, 1, None, 2, None]
    return [
        request(prompt_ids(1 + (5 * i) % 23, seed + i % 5), 4 + (7 * i) % 29, max_drafts=caps[i % len(caps)])
        for i in range(count)
    ]


@pytest.mark.parametrize('overlap', [0, 1])
@pytest.mark.parametrize('draft', ['dflash_sliding', 'dspark_rnn'])
def test_thirty_two_requests_come_and_go(world: World, ledger: Ledger, draft: str, overlap: int) -> None:
    models = world.models(draft)
    requests = ragged(32, 0)
    arrivals = [(3 * i) % 25 for i in range(32)]
    driver = drive(make_engine(models, Settings(max_batch_size=32, chunk=16, overlap=overlap)))
    for outcome in generate(driver, requests, arrivals):
        asked = outcome.request.params
        ledger.same(models, ledger.plain(models, outcome.request.prompt_ids, asked.max_new_tokens), outcome)
        assert all(drafted <= (G if asked.max_drafts is None else asked.max_drafts) for drafted, _ in outcome.steps)
    mixed = [plan for plan in driver.plans if plan.chunks and plan.decodes]
    assert len(mixed) > 5


@pytest.mark.slow
@pytest.mark.parametrize('draft', ['dflash_fill_in', 'dspark_fill_in_d2t', 'dspark_vanilla'])
def test_thirty_two_requests_and_hundreds_of_preemptions(world: World, ledger: Ledger, draft: str) -> None:
    models = world.models(draft)
    for caching in (True, False):
        preemptions = 0
        for seed in range(4):
            requests = ragged(32, 10 * seed)
            tiny_pool = Settings(
                max_batch_size=32, chunk=16, num_pages=34, page_size=2, session_len=64, prefix_caching=caching
            )
            driver = drive(make_engine(models, tiny_pool))
            for outcome in generate(driver, requests, [(2 * i) % 31 for i in range(32)]):
                asked = outcome.request.params.max_new_tokens
                ledger.same(models, ledger.plain(models, outcome.request.prompt_ids, asked), outcome)
            preemptions += driver.engine.scheduler.stats.preemptions
        assert preemptions >= 60


# ------------------------------------------------------------------------------------------- drafts that know
@given(
    pattern=st.lists(st.integers(0, G), min_size=1, max_size=6),
    num_drafts=st.integers(1, G),
    chunk=st.sampled_from(CHUNKS),
    overlap=st.integers(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_right_for_a_while_then_wrong(
    world: World, ledger: Ledger, pattern: list[int], num_drafts: int, chunk: int, overlap: int
) -> None:
    prompts = [prompt_ids(n) for n in PROMPT_LENGTHS]
    models = knowing(world.models(), ledger, prompts, num_drafts, cycling(pattern))
    for outcome in check_all(models, ledger, Settings(chunk=chunk, overlap=overlap)):
        length = len(outcome.request.prompt_ids)
        for drafted, emitted in outcome.steps:
            assert emitted == min(pattern[length % len(pattern)], drafted) + 1
            length += emitted


@pytest.mark.parametrize('overlap', [0, 1])
@pytest.mark.parametrize('num_drafts', [1, 3, 7])
@pytest.mark.parametrize('right', [0, 99])
def test_adversary_and_oracle(world: World, ledger: Ledger, num_drafts: int, right: int, overlap: int) -> None:
    prompts = [prompt_ids(n) for n in PROMPT_LENGTHS]
    models = knowing(world.models(), ledger, prompts, num_drafts, always(right))
    check_all(models, ledger, Settings(chunk=7, overlap=overlap))


def test_random_ids_as_drafts(world: World, ledger: Ledger) -> None:
    models = world.models()
    for num_drafts in (1, 5, 16):
        check_all(models.with_proposer(RandomProposer(VOCABULARY, num_drafts)), ledger, Settings())


@pytest.mark.parametrize('overlap', [0, 1])
# ----------------------------------------------------------------------------------------------------- limits
@pytest.mark.parametrize('draft', ['dflash_fill_in', 'dspark_vanilla'])
def test_every_small_limit_is_met_exactly(world: World, ledger: Ledger, draft: str, overlap: int) -> None:
    models = world.models(draft)
    limits = range(1, 2 * G + 4)
    for prompt in (prompt_ids(1), prompt_ids(PAGE)):
        found = generate(
            make_engine(models, Settings(max_batch_size=16, overlap=overlap)), [request(prompt, n) for n in limits]
        )
        for limit, outcome in zip(limits, found):
            assert len(outcome.token_ids) == limit
            assert outcome.finish == 'length'
            ledger.same(models, ledger.plain(models, prompt, limit), outcome)


def test_every_small_limit_with_an_oracle(world: World, ledger: Ledger) -> None:
    prompt = prompt_ids(5)
    for limit in range(1, 2 * G + 4):
        models = knowing(world.models(), ledger, [prompt], G, always(G), new_tokens=40)
        [outcome] = generate(make_engine(models), [request(prompt, limit)])
        ledger.same(models, ledger.plain(models, prompt, limit), outcome)
        assert all(drafted == emitted - 1 for drafted, emitted in outcome.steps)
        assert len(outcome.token_ids) == limit


@pytest.mark.parametrize('overlap', [0, 1])
@pytest.mark.parametrize('session_len', [4 * PAGE - 1, 4 * PAGE, 4 * PAGE + 1])
@pytest.mark.parametrize('draft', ['dflash_sliding', 'dspark_gated'])
def test_session_len_is_reached_exactly(
    world: World, ledger: Ledger, draft: str, session_len: int, overlap: int
) -> None:
    models = world.models(draft)
    tight = Settings(session_len=session_len, max_batch_size=4, num_pages=-(-session_len // PAGE))
    for one in (Settings(session_len=session_len), tight):
        engine_settings = replace(one, overlap=overlap)
        lengths = [1, session_len - 2, session_len - 1, PAGE]
        prompts = [prompt_ids(n, 6) for n in lengths]
        for prompt, outcome in zip(
            prompts, generate(make_engine(models, engine_settings), [request(p, 100) for p in prompts])
        ):
            assert len(outcome.text) == session_len
            assert outcome.finish == 'length'
            plain = ledger.plain(models, prompt, session_len - len(prompt))
            ledger.same(models, plain, outcome)


@pytest.mark.parametrize('draft', ['dflash_fill_in', 'dspark_fill_in'])
def test_longest_session_of_the_model(world: World, ledger: Ledger, draft: str) -> None:
    """The last positions of the rotary tables: block rows reach beyond the last token that may be emitted."""
    models = world.models(draft)
    limit = models.sources.target.decoder.max_position
    prompts = [prompt_ids(limit - 20), prompt_ids(limit - 1)]
    engine = make_engine(models, Settings(session_len=limit, max_batch_size=2, page_size=64, chunk=64))
    for prompt, outcome in zip(prompts, generate(engine, [request(p, 100) for p in prompts])):
        assert len(outcome.text) == limit
        ledger.same(models, ledger.plain(models, prompt, limit - len(prompt)), outcome)


@pytest.mark.parametrize('draft', ['dflash_fill_in', 'dspark_vanilla'])
def test_output_that_ends_with_a_page_becomes_a_prompt(world: World, ledger: Ledger, draft: str) -> None:
    models = world.models(draft)
    for length in (1, PAGE, PAGE + 3):
        for page in range(1, 5):
            engine = make_engine(models)
            prompt = prompt_ids(length, 4)
            new_tokens = -length % PAGE + page * PAGE
            [first] = generate(engine, [request(prompt, new_tokens)])
            assert len(first.text) % PAGE == 0
            [second] = generate(engine, [request(first.text, NEW_TOKENS)])
            ledger.same(models, ledger.plain(models, tuple(first.text), NEW_TOKENS), second)
            assert second.cached == [len(first.text) - PAGE]  # the last token was never committed
            [third] = generate(engine, [request(first.text + second.token_ids, 9)])
            ledger.same(models, ledger.plain(models, tuple(first.text + second.token_ids), 9), third)


# ------------------------------------------------------------------------------------------------- the judge itself
def test_the_judge_finds_a_wrong_token(world: World, ledger: Ledger) -> None:
    models = world.models()
    outcome = ledger.plain(models, prompt_ids(5), NEW_TOKENS)
    wrong = replace(outcome, token_ids=[*outcome.token_ids[:9], (outcome.token_ids[9] + 1) % VOCABULARY])
    with pytest.raises(AssertionError, match=f'at position {5 + 9} .* picks {outcome.token_ids[9]} by'):
        Ledger().same(models, outcome, wrong)
    with pytest.raises(AssertionError):
        Ledger().check_against_forward(models, wrong)
    with pytest.raises(AssertionError):
        Ledger().same(models, outcome, replace(outcome, token_ids=outcome.token_ids[:-1]))
    with pytest.raises(AssertionError):
        Ledger().same(models, outcome, replace(outcome, finish='stop'))


def test_ties_are_excused_once_in_ten_thousand_tokens() -> None:
    Ledger(tokens=9_000, excuses=['a tie']).close()
    Ledger(tokens=21_000, excuses=['a tie'] * 2).close()
    with pytest.raises(AssertionError):
        Ledger(tokens=19_000, excuses=['a tie'] * 2).close()
