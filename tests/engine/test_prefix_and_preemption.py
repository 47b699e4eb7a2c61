"""Pages, slots and aborts under attack: whatever is taken away or shared, nobody's text and no page changes."""

import random
from collections.abc import Callable

import pytest
import torch

from specdec.messages import EngineRequest
from tests.helpers.engines import (
    MAX_STEPS,
    PAGE,
    VOCABULARY,
    Driver,
    Models,
    Outcome,
    Settings,
    World,
    drive,
    generate,
    make_engine,
    prompt_ids,
    request,
)
from tests.helpers.exactness import Ledger
from tests.helpers.proposers import KnowingProposer, cycling

NEW_TOKENS = 24
OVERLAPS = pytest.mark.parametrize('overlap', [0, 1])


def check(models: Models, ledger: Ledger, driver: Driver, requests: list[EngineRequest]) -> None:
    for asked in requests:
        ledger.same(models, plain(models, ledger, asked), driver.outcomes[asked.request_id])


def plain(models: Models, ledger: Ledger, asked: EngineRequest) -> Outcome:
    """What plain decoding gives for a request."""
    params = asked.params
    sampling = {name: getattr(params, name) for name in ('temperature', 'seed', 'top_k', 'top_p')}
    return ledger.plain(models, asked.prompt_ids, params.max_new_tokens, **sampling if params.temperature else {})


# ------------------------------------------------------------------------------------------------------- hits
@pytest.mark.parametrize('draft', [None, 'dflash_fill_in', 'dspark_vanilla'])
def test_hits_are_as_deep_with_drafts_as_without(world: World, draft: str | None) -> None:
    driver = drive(make_engine(world.models(draft)))
    base = prompt_ids(5 * PAGE, 2)
    generate(driver, [request(base, 6)])
    for shared in range(5 * PAGE + 1):
        changed = base[:shared] + tuple((t + 1) % VOCABULARY for t in base[shared : shared + 3]) + (1, 2)
        [outcome] = generate(driver, [request(changed, 1)])
        whole = shared // PAGE * PAGE
        assert outcome.cached == [min(whole, (len(changed) - 1) // PAGE * PAGE)]


def test_three_turns_of_a_chat(world: World, ledger: Ledger) -> None:
    models = world.models('dspark_vanilla')
    driver, history, requests, previous = drive(make_engine(models)), prompt_ids(7, 2), [], 1
    for turn in range(4):
        requests.append(request(history, 11 + turn))
        [outcome] = generate(driver, [requests[-1]])
        assert outcome.cached == [(previous - 1) // PAGE * PAGE]
        previous = len(outcome.text)
        history = (*outcome.text, *prompt_ids(4 + turn, 2))
    check(models, ledger, driver, requests)


def test_without_caching_nothing_is_found(world: World, ledger: Ledger) -> None:
    models = world.models('dspark_vanilla')
    driver = drive(make_engine(models, Settings(prefix_caching=False)))
    requests = [request(prompt_ids(3 * PAGE, 2), NEW_TOKENS) for _ in range(3)]
    outcomes = generate(driver, requests, [0, 3, 50])
    assert [outcome.cached for outcome in outcomes] == [[0]] * 3
    check(models, ledger, driver, requests)


def test_an_evicted_prefix_is_computed_again(world: World, ledger: Ledger) -> None:
    models = world.models('dflash_fill_in')
    driver = drive(make_engine(models, Settings(num_pages=16, session_len=60, max_batch_size=2)))
    requests = [request(prompt_ids(20, seed), 16) for seed in (1, 2, 3, 1, 2, 1)]
    for asked in requests:
        generate(driver, [asked])
    check(models, ledger, driver, requests)


# ------------------------------------------------------------------------------------------------------ pages
@OVERLAPS
def test_pages_that_can_be_found_never_change(world: World, ledger: Ledger, overlap: int) -> None:
    """Every findable page's content, target's and draft's, from when it becomes so until it is evicted."""
    models, dice = world.models('dspark_vanilla'), random.Random(1)
    driver = drive(make_engine(models, Settings(num_pages=40, max_batch_size=8, chunk=16, overlap=overlap)))
    engine, pages = driver.engine, driver.engine.scheduler.pages
    caches = engine.agent.model.caches
    tensors = [*caches.target.k, *caches.target.v, *caches.draft.k, *caches.draft.v]
    requests = [request(prompt_ids(4 * (1 + i % 4), i % 3), 5 + 3 * (i % 7)) for i in range(30)]
    waiting, known = list(requests), {}
    for _ in range(MAX_STEPS):
        if waiting and dice.random() < 0.5:
            driver.add(waiting.pop(0))
        driver.step()
        now = {}
        for page, key in pages._key_ids.items():
            content = torch.cat([x[page].flatten() for x in tensors])
            now[key] = content
            if key in known:
                assert torch.equal(known[key], content), 'a page changed although others may read it'
        known = now
        if not waiting and not engine.has_work():
            break
    check(models, ledger, driver, requests)
    assert len(known) > 10


# ------------------------------------------------------------------------------------------------------ aborts
@OVERLAPS
@pytest.mark.parametrize('draft', ['dflash_sliding', 'dspark_fill_in_rnn'])
def test_abort_at_any_step(world: World, ledger: Ledger, draft: str, overlap: int) -> None:
    """Waiting, inside the prompt, decoding, preempted: an abort frees everything and changes nobody else."""
    models = world.models(draft)
    for moment in range(16):
        driver = drive(make_engine(models, Settings(max_batch_size=3, chunk=5, num_pages=36, overlap=overlap)))
        requests = [request(prompt_ids(3 + 4 * i, 4), NEW_TOKENS) for i in range(5)]
        for asked in requests:
            driver.add(asked)
        for _ in range(moment):
            driver.step()
        victims = [requests[moment % 5], requests[(moment * 3 + 1) % 5]]
        driver.engine.abort([v.request_id for v in victims])
        driver.engine.abort([v.request_id for v in victims] + [10**9])  # unknown and finished ids are no error
        emitted = {v.request_id: len(driver.outcomes[v.request_id].token_ids) for v in victims}
        driver.run()
        for victim in victims:
            outcome = driver.outcomes[victim.request_id]
            assert len(outcome.token_ids) == emitted[victim.request_id], 'output after the abort'
        check(models, ledger, driver, [r for r in requests if r not in victims])
        scheduler = driver.engine.scheduler
        assert scheduler.pages.num_available == scheduler.config.num_pages - 1
        again = request(requests[2].prompt_ids, NEW_TOKENS)
        generate(driver, [again])
        check(models, ledger, driver, [again])


@OVERLAPS
def test_abort_of_a_preempted_request_whose_step_is_under_way(world: World, ledger: Ledger, overlap: int) -> None:
    models = world.models('dspark_vanilla')
    driver = drive(make_engine(models, Settings(overlap=overlap)))
    requests = [request(prompt_ids(5, i), NEW_TOKENS) for i in range(3)]
    for asked in requests:
        driver.add(asked)
    for _ in range(4):
        driver.step()
    scheduler = driver.engine.scheduler
    victim = next(s for s in scheduler.running if s.request is requests[1])
    scheduler._preempt(victim)
    driver.engine.abort([requests[1].request_id])
    driver.run()
    check(models, ledger, driver, [requests[0], requests[2]])


def test_abort_everything(world: World) -> None:
    driver = drive(make_engine(world.models('dspark_vanilla'), Settings(overlap=1)))
    requests = [request(prompt_ids(9, i), NEW_TOKENS) for i in range(9)]
    for asked in requests:
        driver.add(asked)
    for _ in range(5):
        driver.step()
    driver.engine.abort([r.request_id for r in requests])
    driver.run()


# ------------------------------------------------------------------------------------------------------- slots
def test_a_slot_forgets_its_last_tenant(world: World, ledger: Ledger) -> None:
    """One slot, tenants with every kind of setting: each runs as in a fresh engine."""
    models = world.models('dspark_gated')
    driver = drive(make_engine(models, Settings(max_batch_size=1)))
    first = ledger.plain(models, prompt_ids(9), NEW_TOKENS).token_ids
    tenants = [
        request(
            prompt_ids(9), NEW_TOKENS, temperature=1.0, seed=2**63 + 1, top_k=3, banned_ids=(first[0],), logprobs=3
        ),
        request(prompt_ids(9), NEW_TOKENS),
        request(prompt_ids(9), NEW_TOKENS, stop_ids=(first[5],), min_new_tokens=2),
        request(prompt_ids(3), NEW_TOKENS, temperature=1.0, seed=4),
        request(prompt_ids(9), 3, max_drafts=0),
        request(prompt_ids(9), NEW_TOKENS, temperature=0.3, top_p=0.5, seed=4),
        request(prompt_ids(9), NEW_TOKENS),
    ]
    for tenant in tenants:
        [found] = generate(driver, [tenant])
        [fresh] = generate(make_engine(models, Settings(max_batch_size=1)), [tenant])
        assert found.token_ids == fresh.token_ids
        assert found.finish == fresh.finish
        assert [drafted for drafted, _ in found.steps] == [drafted for drafted, _ in fresh.steps]


@OVERLAPS
def test_requests_that_end_in_the_middle_of_the_batch_every_step(world: World, ledger: Ledger, overlap: int) -> None:
    models = world.models('dflash_anchor_first')
    driver = drive(make_engine(models, Settings(max_batch_size=6, overlap=overlap)))
    requests = [request(prompt_ids(2 + i % 9, i % 4), 1 + (i * 5) % 8) for i in range(60)]
    generate(driver, requests, [i // 3 for i in range(60)])
    check(models, ledger, driver, requests)


# -------------------------------------------------------------------------------------------------------- fuzz
def fuzz(models: Callable[[list[EngineRequest]], Models], ledger: Ledger, seed: int, count: int) -> None:
    """Random requests, arrivals, preemptions and aborts in a small pool; survivors' texts are checked."""
    dice = random.Random(seed)
    kinds = [{}, {}, {'temperature': 1.0, 'seed': seed}, {'temperature': 0.5, 'seed': 1, 'top_k': 7}]
    requests = [
        request(
            prompt_ids(dice.randint(1, 30), dice.randint(0, 4)),
            dice.randint(1, 30),
            max_drafts=dice.choice([None, None, 0, 1, 3]),
            **dice.choice(kinds),
        )
        for _ in range(count)
    ]
    made = models(requests)
    page_size = dice.choice([1, 4, 16])
    pages = -(-60 // page_size)
    settings = Settings(
        session_len=60,
        max_batch_size=dice.choice([1, 3, 8]),
        chunk=dice.choice([1, 7, 64]),
        page_size=page_size,
        num_pages=dice.choice([pages, pages + 3, 3 * pages]),
        prefix_caching=dice.random() < 0.7,
        overlap=dice.randint(0, 1),
    )
    driver, waiting, aborted = drive(make_engine(made, settings)), list(requests), set()
    scheduler = driver.engine.scheduler
    for _ in range(MAX_STEPS):
        while waiting and dice.random() < 0.4:
            driver.add(waiting.pop(0))
        driver.step()
        if scheduler.running and dice.random() < 0.1:
            scheduler._preempt(dice.choice(scheduler.running))
        live = [r.request_id for r in requests if r.request_id in scheduler._by_id]
        if live and dice.random() < 0.03:
            victim = dice.choice(live)
            aborted.add(victim)
            driver.engine.abort([victim])
        if not waiting and not driver.engine.has_work():
            break
    scheduler.check()
    check(made, ledger, driver, [r for r in requests if r.request_id not in aborted])


def knowing(world: World, ledger: Ledger, requests: list[EngineRequest]) -> Models:
    """A draft that knows all these texts, right for 0 to 4 tokens, and fails on any page that spells another text."""
    models = world.models()
    texts = [plain(models, ledger, asked).text for asked in requests]
    return models.with_proposer(KnowingProposer(models.target, 4, texts, cycling([4, 0, 2, 4, 1])))


@pytest.mark.parametrize('seed', range(12))
def test_fuzz(world: World, ledger: Ledger, seed: int) -> None:
    if seed % 2:
        fuzz(lambda requests: knowing(world, ledger, requests), ledger, seed, 24)
    else:
        fuzz(lambda _: world.models('dspark_fill_in_d2t'), ledger, seed, 24)


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(100, 124))
def test_fuzz_more(world: World, ledger: Ledger, seed: int) -> None:
    drafts = ['dflash_sliding', 'dspark_rnn', 'dflash_anchor_first', 'dspark_sliding']
    if seed % 2:
        fuzz(lambda requests: knowing(world, ledger, requests), ledger, seed, 40)
    else:
        fuzz(lambda _: world.models(drafts[seed // 2 % 4]), ledger, seed, 40)
