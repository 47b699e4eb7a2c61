"""Where a request ends, what it may not emit before, and what is counted: the same with drafts as without."""

from typing import Any

import pytest
import torch

from specdec.messages import EngineRequest
from tests.helpers.engines import (
    PAGE,
    VOCABULARY,
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
from tests.helpers.exactness import Ledger, reference
from tests.helpers.proposers import KnowingProposer, always

G = 4
PROMPT = prompt_ids(2 * PAGE, 5)
DRAFTS = ['oracle', 'dspark_vanilla', 'dflash_anchor_first']


def with_draft(world: World, ledger: Ledger, draft: str, **params: Any) -> Models:
    """An oracle knows the text that these settings give, and what follows it when they are taken away."""
    models = world.models()
    if draft != 'oracle':
        return world.models(draft)
    text = ledger.plain(models, PROMPT, 60, **params).text
    return models.with_proposer(KnowingProposer(models.target, G, [text], always(G), strict=False))


def run(models: Models, *requests: EngineRequest, **changes: Any) -> list[Outcome]:
    return generate(make_engine(models, Settings(max_batch_size=8, **changes)), requests)


def first_places(tokens: list[int]) -> dict[int, int]:
    return {token: i for i, token in reversed(list(enumerate(tokens)))}


# ------------------------------------------------------------------------------------------------------- stops
@pytest.mark.parametrize('overlap', [0, 1])
@pytest.mark.parametrize('draft', DRAFTS)
def test_a_stop_id_at_every_place(world: World, ledger: Ledger, draft: str, overlap: int) -> None:
    models = with_draft(world, ledger, draft)
    tokens = ledger.plain(models, PROMPT, 60).token_ids
    for stop, place in first_places(tokens).items():
        [outcome] = run(models, request(PROMPT, 60, stop_ids=(stop,)), overlap=overlap)
        assert outcome.token_ids == tokens[: place + 1]
        assert outcome.finish == 'stop'


@pytest.mark.parametrize('draft', DRAFTS)
def test_several_stop_ids_in_one_block(world: World, ledger: Ledger, draft: str) -> None:
    models = with_draft(world, ledger, draft)
    tokens = ledger.plain(models, PROMPT, 60).token_ids
    for start in range(20):
        stops = tuple(set(tokens[start : start + 3]))
        first = min(tokens.index(stop) for stop in stops)
        [outcome] = run(models, request(PROMPT, 60, stop_ids=stops[::-1]))
        assert outcome.token_ids == tokens[: first + 1]
        assert outcome.finish == 'stop'


@pytest.mark.parametrize('draft', DRAFTS)
def test_stop_and_limit_at_the_same_token(world: World, ledger: Ledger, draft: str) -> None:
    models = with_draft(world, ledger, draft)
    tokens = ledger.plain(models, PROMPT, 60).token_ids
    for stop, place in first_places(tokens).items():
        for limit, reason in ((place + 1, 'stop'), (place, 'length'), (place + 2, 'stop')):
            if limit:
                [outcome] = run(models, request(PROMPT, limit, stop_ids=(stop,)))
                assert outcome.finish == reason
                assert outcome.token_ids == tokens[: min(limit, place + 1)]


# ------------------------------------------------------------------------------------------- the minimum length
@pytest.mark.parametrize('draft', DRAFTS)
@pytest.mark.parametrize('params', [{}, {'temperature': 1.0, 'seed': 21}], ids=['greedy', 'sampled'])
def test_min_new_tokens(world: World, ledger: Ledger, draft: str, params: dict[str, Any]) -> None:
    """No stop id among the first min_new_tokens; token min_new_tokens + 1 may be one."""
    free = ledger.plain(world.models(), PROMPT, 60, **params)
    likely = tuple(sorted(set(free.token_ids), key=free.token_ids.count)[-4:])
    reasons = set()
    for minimum in range(2 * G + 3):
        asked = {'stop_ids': likely, 'min_new_tokens': minimum, **params}
        expected = ledger.plain(world.models(), PROMPT, 40, **asked)
        models = with_draft(world, ledger, draft, **params)
        if draft == 'oracle':
            models = models.with_proposer(KnowingProposer(models.target, G, [expected.text], always(G), strict=False))
        for caps in (None, 1, 0):
            [outcome] = run(models, request(PROMPT, 40, max_drafts=caps, **asked))
            ledger.same(models, expected, outcome)
            assert not set(outcome.token_ids[:minimum]) & set(likely)
            reasons.add((outcome.finish, len(outcome.token_ids) == minimum + 1))
    assert ('stop', True) in reasons


def test_a_stop_becomes_legal_at_exactly_the_next_token(world: World, ledger: Ledger) -> None:
    """The stop is what the target wants most, from some row on: it comes right after the minimum."""
    models = world.models('dspark_vanilla')
    text = ledger.plain(models, PROMPT, 60).text
    for minimum in (1, G, G + 1, 20):
        place = len(PROMPT) + minimum
        stop = int(reference(models, text[:place]).logits[-1].argmax())
        if stop in text[len(PROMPT) : place]:
            continue
        [outcome] = run(models, request(PROMPT, 60, stop_ids=(stop,), min_new_tokens=minimum))
        assert (len(outcome.token_ids), outcome.finish) == (minimum + 1, 'stop')


@pytest.mark.parametrize('draft', ['dspark_vanilla', 'dflash_fill_in'])
def test_banned_ids_never_come_and_the_rest_is_plain_decoding(world: World, ledger: Ledger, draft: str) -> None:
    """What ignore_eos does: EOS ids are banned; a draft that proposes one is rejected."""
    models = world.models(draft)
    tokens = ledger.plain(models, PROMPT, 30).token_ids
    banned = tuple(set(tokens[:3]))
    for params in ({}, {'temperature': 1.0, 'seed': 4, 'top_k': 6}):
        expected = ledger.plain(models, PROMPT, 30, banned_ids=banned, **params)
        assert not set(expected.token_ids) & set(banned)
        found = run(models, request(PROMPT, 30, banned_ids=banned, **params), request(PROMPT, 30))
        ledger.same(models, expected, found[0])
        ledger.same(models, ledger.plain(models, PROMPT, 30), found[1])


# ---------------------------------------------------------------------------------------------- log-probabilities
@pytest.mark.parametrize('overlap', [0, 1])
@pytest.mark.parametrize('draft', ['dspark_vanilla', 'dflash_sliding', 'oracle'])
@pytest.mark.parametrize('params', [{}, {'temperature': 0.7, 'seed': 6, 'top_k': 9}], ids=['greedy', 'sampled'])
def test_logprobs_equal_those_of_plain_decoding(
    world: World, ledger: Ledger, draft: str, params: dict[str, Any], overlap: int
) -> None:
    models = with_draft(world, ledger, draft, **params)
    for count in (0, 1, 5):
        expected = ledger.plain(models, PROMPT, 40, logprobs=count, **params)
        [outcome] = run(models, request(PROMPT, 40, logprobs=count, **params), overlap=overlap)
        assert ledger.same(models, expected, outcome)
        raw = reference(models, outcome.text[:-1]).logits[len(PROMPT) - 1 :].log_softmax(-1)
        assert len(outcome.logprobs) == len(expected.logprobs) == len(outcome.token_ids) == len(raw)
        for token, mine, theirs, row in zip(outcome.token_ids, outcome.logprobs, expected.logprobs, raw):
            check_entry(mine, token, count, row)
            assert mine == pytest.approx({token_id: theirs[token_id] for token_id in mine}, abs=1e-4)


def check_entry(entry: dict[int, float], token: int, count: int, row: torch.Tensor) -> None:
    """The emitted token first, then the best others in order, all of them log-probabilities of the raw logits."""
    ids, values = list(entry), list(entry.values())
    assert ids[0] == token
    assert values[1:] == sorted(values[1:], reverse=True)
    best = set(row.topk(count).indices.tolist()) if count else set()
    assert set(ids) == best | {token}
    assert entry == pytest.approx({i: float(row[i]) for i in ids}, abs=1e-4)
    assert all(value < 0 for value in values)
    assert sum(torch.tensor(values).exp()) <= 1 + 1e-5


def test_each_request_gets_the_logprobs_it_asked_for(world: World) -> None:
    """Neighbours in a batch ask for none, for some, for more: nobody sees what another one asked for."""
    models = world.models('dspark_vanilla')
    asked = [None, 0, 2, 7, None, 1]
    prompts = [prompt_ids(3 + i, 5) for i in range(len(asked))]
    found = run(models, *[request(p, 20, logprobs=n) for p, n in zip(prompts, asked)])
    for prompt, count, outcome in zip(prompts, asked, found):
        if count is None:
            assert not outcome.logprobs
            continue
        raw = reference(models, outcome.text[:-1]).logits[len(prompt) - 1 :].log_softmax(-1)
        for token, entry, row in zip(outcome.token_ids, outcome.logprobs, raw, strict=True):
            check_entry(entry, token, count, row)


# -------------------------------------------------------------------------------------------------------- counts
@pytest.mark.parametrize('draft', DRAFTS)
@pytest.mark.parametrize('overlap', [0, 1])
def test_what_is_counted_adds_up(world: World, ledger: Ledger, draft: str, overlap: int) -> None:
    """emitted = prefill firsts + decode steps + accepted, stops and limits inside blocks and preemptions included."""
    models = with_draft(world, ledger, draft)
    tokens = ledger.plain(models, PROMPT, 60).token_ids
    driver = drive(make_engine(models, Settings(max_batch_size=8, overlap=overlap)))
    rare = [token for token, _ in sorted(first_places(tokens).items(), key=lambda item: -item[1])]
    limits = ((3, 0), (14, 1), (40, 2), (40, 5), (55, 0))
    requests = [request(PROMPT, limit, stop_ids=(rare[n],)) for limit, n in limits]
    for added in requests:
        driver.add(added)
    number = 0
    while driver.engine.has_work():
        driver.step()
        number += 1
        if number % 3 == 0 and driver.engine.scheduler.running:
            driver.engine.scheduler._preempt(driver.engine.scheduler.running[-1])
    for asked in requests:
        outcome = driver.outcomes[asked.request_id]
        assert len(outcome.token_ids) == outcome.firsts + len(outcome.steps) + outcome.accepted
        assert all(1 <= emitted <= drafted + 1 for drafted, emitted in outcome.steps)
    assert sum(driver.outcomes[r.request_id].firsts for r in requests) > len(requests)


def test_ids_of_the_mask_and_of_padding_may_be_text(world: World, ledger: Ledger) -> None:
    """A prompt, and an anchor, may hold the draft's mask id; id 0 and the last id are ordinary too."""
    models = world.models('dflash_fill_in')
    mask = models.sources.draft.mask_id
    assert mask < VOCABULARY
    for prompt in ((mask,), (0, mask, 0), (mask,) * 9, (0,) * 5):
        [outcome] = run(models, request(prompt, 25))
        ledger.same(models, ledger.plain(models, prompt, 25), outcome)
