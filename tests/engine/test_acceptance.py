"""Drafts are as good after any history as after none: the oracle is always right, and a real draft proposes the same.

Tokens proposed behind a prefix are compared, not only how many were accepted: they show a wrong context at once.
"""

import pytest
import torch

from specdec import PytorchEngineConfig, SpeculativeConfig
from specdec.demo.prompts import held_out_prompts
from specdec.engine.build import build_engine, demo_folder
from specdec.engine.tokenizer import Tokenizer
from specdec.layers.cache_specs import CacheRoom
from tests.helpers.engines import (
    MAX_STEPS,
    PAGE,
    Driver,
    Models,
    Settings,
    World,
    draft_pages,
    drive,
    generate,
    make_engine,
    prompt_ids,
    request,
)
from tests.helpers.exactness import Ledger, taps_of
from tests.helpers.proposers import KnowingProposer, always

NEW_TOKENS = 40
DRAFTS = ['dflash_fill_in', 'dflash_sliding', 'dflash_anchor_first', 'dspark_vanilla', 'dspark_fill_in_rnn']
PROMPT = prompt_ids(3 * PAGE + 2, 8)


def first_run(models: Models, prompt=PROMPT, **params) -> tuple[Driver, dict[int, tuple[int, ...]], list]:
    """A fresh engine's driver, what was proposed at each length, and the steps."""
    driver = drive(make_engine(models))
    asked = request(prompt, NEW_TOKENS, **params)
    [outcome] = generate(driver, [asked])
    return driver, driver.proposals[asked.request_id], outcome.steps


def same_proposals(expected: dict[int, tuple[int, ...]], found: dict[int, tuple[int, ...]]) -> None:
    shared = expected.keys() & found.keys()
    assert shared
    assert {n: found[n] for n in shared} == {n: expected[n] for n in shared}


# ------------------------------------------------------------------------------------------------- the oracle
@pytest.mark.parametrize('num_drafts', [1, 3, 7])
@pytest.mark.parametrize('params', [{}, {'temperature': 1.0, 'seed': 9, 'top_p': 0.9}], ids=['greedy', 'sampled'])
def test_the_targets_own_continuation_is_always_accepted(
    world: World, ledger: Ledger, num_drafts: int, params: dict
) -> None:
    plain = world.models()
    prompts = [prompt_ids(n, 8) for n in (1, PAGE, 11, 17)]
    texts = [ledger.plain(plain, p, NEW_TOKENS, **params).text for p in prompts]
    models = plain.with_proposer(KnowingProposer(plain.target, num_drafts, texts, always(num_drafts)))
    for chunk in (1, 7, 512):
        engine = make_engine(models, Settings(chunk=chunk))
        for _ in range(2):
            for outcome in generate(engine, [request(p, NEW_TOKENS, **params) for p in prompts]):
                assert all(emitted == drafted + 1 for drafted, emitted in outcome.steps)
                assert all(drafted == num_drafts for drafted, _ in outcome.steps[:-1])
                assert len(outcome.steps) == -(-(NEW_TOKENS - 1) // (num_drafts + 1))


# ----------------------------------------------------------------------------------------------- a real draft
@pytest.mark.parametrize('draft', DRAFTS)
def test_chunked_prompts(world: World, draft: str) -> None:
    models = world.models(draft)
    _, expected, steps = first_run(models)
    for chunk in (1, 7, PAGE, 512):
        driver = drive(make_engine(models, Settings(chunk=chunk)))
        asked = request(PROMPT, NEW_TOKENS)
        [outcome] = generate(driver, [asked])
        same_proposals(expected, driver.proposals[asked.request_id])
        assert outcome.steps == steps


@pytest.mark.parametrize('draft', DRAFTS)
def test_prefix_hit(world: World, draft: str) -> None:
    models = world.models(draft)
    driver, expected, steps = first_run(models)
    for _ in range(2):
        again = request(PROMPT, NEW_TOKENS)
        [outcome] = generate(driver, [again])
        assert outcome.cached == [3 * PAGE]
        same_proposals(expected, driver.proposals[again.request_id])
        assert outcome.steps == steps
    # and the whole text as a prompt, which hits pages that decode steps wrote
    longer = request(outcome.text[: len(PROMPT) + 21], NEW_TOKENS - 21)
    [outcome] = generate(driver, [longer])
    assert outcome.cached == [(len(PROMPT) + 20) // PAGE * PAGE]
    same_proposals(expected, driver.proposals[longer.request_id])


@pytest.mark.parametrize('draft', DRAFTS)
@pytest.mark.parametrize('caching', [True, False])
def test_after_preemptions(world: World, draft: str, caching: bool) -> None:
    models = world.models(draft)
    _, expected, _ = first_run(models)
    driver = drive(make_engine(models, Settings(prefix_caching=caching, chunk=7)))
    asked = request(PROMPT, NEW_TOKENS)
    driver.add(asked)
    scheduler = driver.engine.scheduler
    for number in range(MAX_STEPS):
        driver.step()
        if number % 9 == 8 and scheduler.running:
            scheduler._preempt(scheduler.running[0])
        if not driver.engine.has_work():
            break
    assert scheduler.stats.preemptions >= 3
    same_proposals(expected, driver.proposals[asked.request_id])


@pytest.mark.parametrize('draft', DRAFTS)
def test_in_a_batch(world: World, draft: str) -> None:
    models = world.models(draft)
    _, expected, steps = first_run(models)
    driver = drive(make_engine(models, Settings(max_batch_size=8, chunk=16)))
    asked = request(PROMPT, NEW_TOKENS)
    others = [request(prompt_ids(1 + 3 * i, 9), 5 + 6 * i, max_drafts=[None, 0, 2][i % 3]) for i in range(7)]
    generate(driver, [*others[:3], asked, *others[3:]], [0, 0, 2, 3, 3, 5, 8, 11])
    same_proposals(expected, driver.proposals[asked.request_id])
    assert driver.outcomes[asked.request_id].steps == steps


@pytest.mark.parametrize('draft', DRAFTS)
def test_prompts_of_whole_pages_under_concurrent_hits(world: World, draft: str) -> None:
    """Requests that share their prompt's pages, while others run: nobody's page changes under him."""
    models = world.models(draft)
    prompt = prompt_ids(4 * PAGE, 8)
    _, expected, steps = first_run(models, prompt)
    driver = drive(make_engine(models, Settings(max_batch_size=8)))
    requests = [request(prompt, NEW_TOKENS) for _ in range(8)]
    outcomes = generate(driver, requests, [0, 2, 2, 3, 5, 5, 9, 14])
    for asked, outcome in zip(requests, outcomes):
        same_proposals(expected, driver.proposals[asked.request_id])
        assert outcome.steps == steps
    assert [outcome.cached for outcome in outcomes[1:]] == [[3 * PAGE]] * 7


@pytest.mark.parametrize('draft', DRAFTS)
def test_pages_of_a_request_without_speculation(world: World, draft: str) -> None:
    """Absorb does not depend on who drafts: the next request drafts as if the pages were its own."""
    models = world.models(draft)
    _, expected, _ = first_run(models)
    driver = drive(make_engine(models))
    [silent] = generate(driver, [request(PROMPT, NEW_TOKENS, max_drafts=0)])
    assert all(drafted == 0 for drafted, _ in silent.steps)
    follower = request(silent.text[: len(PROMPT) + 25], NEW_TOKENS - 25)
    [outcome] = generate(driver, [follower])
    assert outcome.cached == [(len(PROMPT) + 24) // PAGE * PAGE]
    same_proposals(expected, driver.proposals[follower.request_id])


@pytest.mark.parametrize('cap', [1, 2])
def test_caps_change_lengths_and_not_drafts(world: World, cap: int) -> None:
    models = world.models('dspark_vanilla')
    _, expected, _ = first_run(models)
    _, found, steps = first_run(models, max_drafts=cap)
    same_proposals(expected, found)
    assert max(drafted for drafted, _ in steps) == cap


@pytest.mark.parametrize('num_drafts', [1, 2, 3])
@pytest.mark.parametrize('draft', DRAFTS)
def test_smaller_k_proposes_the_beginning_of_the_block(world: World, draft: str, num_drafts: int) -> None:
    _, expected, _ = first_run(world.models(draft))
    _, found, _ = first_run(world.models(draft, num_drafts))
    same_proposals({length: tokens[:num_drafts] for length, tokens in expected.items()}, found)


# -------------------------------------------------------------------------------------------- the draft's pages
@pytest.mark.parametrize('draft', ['dflash_sliding', 'dspark_gated'])
@pytest.mark.parametrize('overlap', [0, 1])
def test_pages_hold_what_a_recomputation_gives(world: World, draft: str, overlap: int) -> None:
    """Any history: every committed token's draft keys and values are those of its taps at its own position."""
    models = world.models(draft)
    driver = drive(make_engine(models, Settings(max_batch_size=6, chunk=7, overlap=overlap)))
    scheduler = driver.engine.scheduler
    for i in range(10):
        kind = {'temperature': 1.0, 'seed': i} if i % 2 else {}
        driver.add(request(prompt_ids(1 + 2 * (i % 4), 8), 20, max_drafts=[None, 0, 2][i % 3], **kind))
    checked = 0
    for number in range(MAX_STEPS):
        driver.step()
        for sequence in scheduler.running:
            if sequence.length and number % 3 == 0:
                known = sequence.tokens[: sequence.length]
                found = draft_pages(driver.engine, sequence.pages, len(known))
                assert torch.allclose(found, recomputed(models, known), atol=1e-4)
                checked += len(known)
        if number % 7 == 6 and scheduler.running:
            scheduler._preempt(scheduler.running[number % len(scheduler.running)])
        if not driver.engine.has_work():
            break
    assert checked > 500


@torch.inference_mode()
def recomputed(models: Models, text: list[int]) -> torch.Tensor:
    """Draft keys and values of a text [layers, 2, tokens, heads, hd], from one forward of the target over all of it."""
    draft = models.proposer.draft
    count = len(text)
    cache = draft.cache_spec().allocate(CacheRoom(1, count, 1), torch.device('cpu'))
    draft.absorb(taps_of(models, text), torch.arange(count), torch.arange(count), cache)
    return torch.stack([torch.stack([k[0], v[0]]) for k, v in zip(cache.k, cache.v)])


# ------------------------------------------------------------------------------------------------- trained drafts
@pytest.mark.parametrize('method', ['dflash', 'dspark'])
def test_trained_drafts_after_chunks_hits_and_preemptions(method: str) -> None:
    """The demo's: several tokens are accepted a step here, so contexts grow by many rows at once."""
    tokenizer = Tokenizer.load(demo_folder('target'))
    prompts = [tokenizer.encode(prompt.text)[:150] for prompt in held_out_prompts()[:3]]

    def run(driver: Driver, preempt_every: int = 0) -> tuple[list[list[int]], list[dict[int, tuple[int, ...]]]]:
        requests = [request(prompt, 48) for prompt in prompts]
        for asked in requests:
            driver.add(asked)
        scheduler, number = driver.engine.scheduler, 0
        while driver.engine.has_work():
            driver.step()
            number += 1
            if preempt_every and number % preempt_every == 0 and scheduler.running:
                scheduler._preempt(scheduler.running[number % len(scheduler.running)])
        scheduler.check()
        return [driver.outcomes[r.request_id].token_ids for r in requests], [
            driver.proposals[r.request_id] for r in requests
        ]

    def driver(chunk: int) -> Driver:
        config = PytorchEngineConfig(
            device_type='cpu', session_len=512, block_size=16, max_batch_size=4, max_prefill_token_num=chunk
        )
        return drive(build_engine('demo', config, SpeculativeConfig(method)))

    cold = driver(512)
    texts, proposals = run(cold)
    steps = sum(len(outcome.steps) for outcome in cold.outcomes.values())
    assert sum(map(len, texts)) / steps > 1.8
    for other in (run(cold), run(driver(7)), run(driver(64), preempt_every=5)):
        assert other[0] == texts
        for expected, found in zip(proposals, other[1]):
            same_proposals(expected, found)
