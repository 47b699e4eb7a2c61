"""Verify lengths change how soon a text is known, never the text: every rule, lengths that jump, heads that lie."""

import json
import random
from typing import Any

import pytest
import torch

from specdec.engine.build import read_sources
from specdec.engine.engine import salted
from specdec.errors import ConfigError
from specdec.messages import PytorchEngineConfig, SpeculativeConfig
from specdec.spec_decode.proposers.base import DraftStep, Proposal
from specdec.spec_decode.proposers.draws import distributions, draw_rows
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
from tests.helpers.lengths import Jumping, with_lengths
from tests.helpers.proposers import KnowingProposer, RandomProposer, cycling
from tests.helpers.statistics import chi_square_p

NEW_TOKENS = 40
PROMPTS = [prompt_ids(n, 11) for n in (1, 2 * PAGE - 1, 2 * PAGE + 1, 30)]
PARAMS: dict[str, dict[str, Any]] = {
    'greedy': {},
    'greedy drafts': {'temperature': 1.0, 'seed': 8, 'draft_sampling': 'greedy'},
    'coupled drafts': {'temperature': 1.0, 'seed': 9, 'draft_sampling': 'coupled'},
}


class Lying(KnowingProposer):
    """Tells the highest survival for the very drafts that are wrong: its head looks at the tokens drawn."""

    has_confidence = True

    def propose(self, step: DraftStep) -> Proposal:
        proposal = super().propose(step)
        histories = self.histories(step)
        survival = torch.ones(proposal.tokens.shape)
        for row, (history, drafts) in enumerate(zip(histories, proposal.tokens.tolist())):
            text = next((t for t in self.texts if t[: len(history)] == history[: len(t)]), [])
            right = [a == b for a, b in zip(drafts, text[len(history) :])]
            survival[row] = torch.tensor([0.1 if k < len(right) and right[k] else 0.9 for k in range(len(drafts))])
        return Proposal(proposal.tokens, survival.cumprod(1))


def check(models: Models, ledger: Ledger, engine: Any, **params: Any) -> list[Any]:
    plain = [ledger.plain(models, prompt, NEW_TOKENS, **{k: v for k, v in params.items() if k != 'draft_sampling'})
             for prompt in PROMPTS]  # fmt: skip
    for _ in range(2):  # cold, then with prefix hits
        found = generate(engine, [request(p, NEW_TOKENS, **params) for p in PROMPTS], arrivals=[0, 0, 3, 9])
        for expected, outcome in zip(plain, found):
            ledger.same(models, expected, outcome)
    return found


@pytest.mark.parametrize('params', PARAMS)
@pytest.mark.parametrize('rule', ['threshold', 'adaptive'])
@pytest.mark.parametrize('draft', ['dflash_fill_in', 'dspark_vanilla', 'dspark_confidence_only'])
def test_text_under_every_rule(world: World, ledger: Ledger, draft: str, rule: str, params: str) -> None:
    models = world.models(draft)
    if rule == 'threshold' and not models.proposer.has_confidence:
        pytest.skip('refused: no confidence head')
    adapted = with_lengths(models, rule)
    check(models, ledger, make_engine(adapted, Settings(chunk=9)), **PARAMS[params])
    check(models, ledger, as_on_a_gpu(make_engine(adapted, Settings(chunk=9))), **PARAMS[params])


@pytest.mark.parametrize('on_gpu', [False, True])
@pytest.mark.parametrize('params', PARAMS)
@pytest.mark.parametrize('draft', ['dflash_fill_in', 'dspark_gated'])
def test_lengths_that_jump(world: World, ledger: Ledger, draft: str, params: str, on_gpu: bool) -> None:
    models = world.models(draft)
    engine = make_engine(with_lengths(models, 'adaptive'), Settings(chunk=9))
    engine.scheduler.lengths = policy = Jumping(3)
    found = check(models, ledger, as_on_a_gpu(engine) if on_gpu else engine, **PARAMS[params])
    drafted = {drafted for outcome in found for drafted, _ in outcome.steps}
    assert len(drafted) > 2
    assert any(not choice.drafting for choice in policy.choices)
    assert policy.observed
    if on_gpu:
        assert engine.agent.eager_decode_steps == 0, 'a shape that was not captured'


@pytest.mark.parametrize('params', PARAMS)
def test_a_head_that_looks_at_the_tokens(world: World, ledger: Ledger, params: str) -> None:
    plain = world.models()
    settings = {k: v for k, v in PARAMS[params].items() if k != 'draft_sampling'}
    texts = [ledger.plain(plain, p, NEW_TOKENS, **settings).text for p in PROMPTS]
    lying = Lying(plain.target, 4, texts, cycling([4, 1, 0, 3]), strict=False)
    models = with_lengths(plain.with_proposer(lying), 'adaptive')
    engine = make_engine(models, Settings(chunk=9))
    engine.scheduler.lengths = Jumping(5)
    check(plain, ledger, engine, **PARAMS[params])
    check(plain, ledger, make_engine(models, Settings(chunk=9)), **PARAMS[params])


def test_preempted_among_strangers(world: World, ledger: Ledger) -> None:
    models, dice = world.models('dspark_vanilla'), random.Random(2)
    engine = make_engine(with_lengths(models, 'adaptive'), Settings(overlap=1))
    engine.scheduler.lengths = Jumping(8)
    driver = drive(engine)
    asked = [request(p, NEW_TOKENS, max_drafts=cap) for p, cap in zip(PROMPTS, (None, 0, 2, 1))]
    for one in asked:
        driver.add(one)
    for _ in range(400):
        driver.step()
        if engine.scheduler.running and dice.random() < 0.2:
            engine.scheduler._preempt(dice.choice(engine.scheduler.running))
        if not engine.has_work():
            break
    for prompt, one in zip(PROMPTS, asked):
        outcome = driver.outcomes[one.request_id]
        ledger.same(models, ledger.plain(models, prompt, NEW_TOKENS), outcome)
        cap = one.params.max_drafts
        assert all(drafted <= (4 if cap is None else cap) for drafted, _ in outcome.steps)


# ------------------------------------------------------------------------------------------------ what it is good for
def test_a_threshold_cuts_lengths(world: World) -> None:
    models = world.models('dspark_vanilla')
    asked = [request(p, NEW_TOKENS) for p in PROMPTS]
    means = []
    for limit in (1e-9, 0.01, 0.5, 0.999999):
        engine = make_engine(with_lengths(models, 'threshold', confidence_threshold=limit))
        steps = [step for outcome in generate(engine, asked) for step in outcome.steps]
        means.append(sum(drafted for drafted, _ in steps) / len(steps))
    assert means == sorted(means, reverse=True)
    assert means[0] > 1.2 * means[-1]


class Expensive:
    """Every row costs as much as a step of its own: no draft ever pays."""

    def target(self, _: int, rows: int) -> float:
        return 1.0 * rows

    def absorb(self, *_: int) -> float:
        return 0.0

    def draft(self, _: int) -> float:
        return 1.0


def test_without_profit_hardly_anything_is_drafted(world: World) -> None:
    models = world.models('dspark_vanilla')
    engine = make_engine(with_lengths(models, 'adaptive'), Settings(session_len=200))
    engine.scheduler.lengths.cost = Expensive()
    driver = drive(engine)
    [outcome] = generate(driver, [request(PROMPTS[1], 150)])
    drafting = [plan.num_drafting > 0 for plan in driver.plans]
    assert sum(drafting) < 10
    assert sum(drafted for drafted, _ in outcome.steps) <= 10


def test_without_a_price_every_draft_is_verified(world: World) -> None:
    models = world.models('dspark_vanilla')
    engine = make_engine(with_lengths(models, 'adaptive'))
    engine.scheduler.lengths.cost = Free()
    [outcome] = generate(engine, [request(PROMPTS[1], NEW_TOKENS)])
    assert {drafted for drafted, _ in outcome.steps[1:-4]} == {4}


class Free(Expensive):
    def target(self, *_: int) -> float:
        return 1.0

    def draft(self, _: int) -> float:
        return 0.0


def test_costs_are_learnt_from_real_steps_and_shown(world: World) -> None:
    engine = make_engine(with_lengths(world.models('dflash_fill_in'), 'adaptive'))
    before = engine.stats().step_cost
    assert json.loads(before)['target']
    generate(engine, [request(PROMPTS[1], NEW_TOKENS)])
    assert engine.stats().step_cost != before
    assert engine.stats().draft_budget is not None
    assert make_engine(world.models('dflash_fill_in')).stats().step_cost == ''


def test_a_draft_without_confidence_learns_from_what_became_of_its_blocks(world: World, ledger: Ledger) -> None:
    plain = world.models()
    texts = [ledger.plain(plain, p, NEW_TOKENS).text for p in PROMPTS]
    right = KnowingProposer(plain.target, 4, texts, cycling([2]), strict=False)  # the third draft is always wrong
    engine = make_engine(with_lengths(plain.with_proposer(right), 'adaptive'))
    engine.scheduler.lengths.cost = Free()
    generate(engine, [request(p, NEW_TOKENS) for p in PROMPTS])
    survival = engine.agent.model.state.history.survival(torch.tensor([0]))[0].tolist()
    assert survival[1] > 0.9
    assert survival[2] < 0.3


# --------------------------------------------------------------------------------------------- probabilistic drafts
def probabilistic(models: Models, rule: str) -> Models:
    return with_lengths(models, rule, draft_sampling='probabilistic')


def test_two_requests_with_one_seed_do_not_share_noise(world: World) -> None:
    """Whether one's draft is verified depends on the other's: with the same noise that would be a bias."""
    models = world.models('dspark_vanilla')
    asked = {'temperature': 1.0, 'seed': 5, 'draft_sampling': 'probabilistic'}
    adaptive = generate(make_engine(probabilistic(models, 'adaptive')), [request(PROMPTS[1], 30, **asked)] * 1)
    again = generate(make_engine(probabilistic(models, 'adaptive')), [request(PROMPTS[1], 30, **asked)])
    assert adaptive[0].token_ids != again[0].token_ids  # another request: salted with its id
    fixed = [
        generate(make_engine(probabilistic(models, 'fixed')), [request(PROMPTS[1], 30, **asked)])[0] for _ in range(2)
    ]
    assert fixed[0].token_ids == fixed[1].token_ids


def test_salts_differ() -> None:
    assert len({salted(7, i) for i in range(1000)}) == 1000
    assert salted(7, 3) == salted(7, 3) != salted(8, 3)
    assert all(0 <= salted(2**64 - 1, i) < 2**64 for i in range(100))


class Guessing(RandomProposer):
    """Draws each draft from a flat law over a few ids, with the noise of its stream; confident where it drew one id."""

    has_confidence = True

    def __init__(self, ids: list[int]) -> None:
        super().__init__(VOCABULARY, 2)
        self.ids = torch.tensor(ids)

    def propose(self, step: DraftStep) -> Proposal:
        count = step.anchors.shape[0]
        logits = torch.full((count, 2, VOCABULARY), -30.0)
        logits[..., self.ids] = 0.0
        tokens = draw_rows(logits, step.sampling, step.lengths, None)
        q = None
        if step.sampling is not None and step.sampling.keeps:
            q = distributions(logits, step.sampling, None, VOCABULARY)
        # of the second draft: the first one's token, its prefix, decides
        second = torch.where(tokens[:, 0] == self.ids[0], 0.9, 0.1)
        survival = torch.stack([torch.full_like(second, 0.8), 0.8 * second], 1)
        return Proposal(tokens, survival, q)


LAW = {'temperature': 1.0, 'top_k': 6, 'draft_sampling': 'probabilistic'}
NUM_REQUESTS = 3000


@pytest.mark.slow
def test_the_law_of_probabilistic_drafts_under_budgets(world: World) -> None:
    """Chi-square of the first two drawn tokens at T = 1: half of the requests share a seed with a neighbour, and
    budgets come from rejected blocks.
    """
    plain, prompt = world.models(), PROMPTS[2]
    whole = reference(plain, prompt)
    likely = whole.logits[-1].topk(4).indices.tolist()
    models = probabilistic(plain.with_proposer(Guessing(likely)), 'adaptive')
    engine = make_engine(models, Settings(max_batch_size=32, chunk=2048, session_len=32))
    engine.scheduler.lengths = Jumping(1)
    requests = [request(prompt, 4, seed=i // 2, **LAW) for i in range(NUM_REQUESTS)]
    outcomes = generate(engine, requests)
    law, _ = survivors(whole.logits[-1], request(prompt, 4, **LAW).params)
    assert chi_square_p([o.token_ids[0] for o in outcomes], law.exp()) > 1e-3
    tested = 0
    for first in likely[:3]:
        law, _ = survivors(reference(plain, (*prompt, first)).logits[-1], request(prompt, 4, **LAW).params)
        seconds = [o.token_ids[1] for o in outcomes if o.token_ids[0] == first]
        if len(seconds) > 200:
            tested += 1
            assert chi_square_p(seconds, law.exp()) > 1e-3
    assert tested


# ------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        ({'verify_length': 'some'}, "verify_length='some'"),
        ({'verify_length': 'threshold'}, 'confidence_threshold=None'),
        ({'confidence_threshold': 0.5}, 'confidence_threshold=0.5'),
        ({'verify_length': 'threshold', 'confidence_threshold': 1.5}, 'confidence_threshold=1.5'),
        ({'verify_length': 'threshold', 'confidence_threshold': 'high'}, "confidence_threshold='high'"),
    ],
)
def test_refused_settings(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig('dspark', 'draft', **changes)
    assert words in str(caught.value)


def test_a_threshold_needs_a_confidence_head(world: World) -> None:
    draft = world.draft_folder('dflash_fill_in')
    speculative = SpeculativeConfig('dflash', str(draft), verify_length='threshold', confidence_threshold=0.5)
    with pytest.raises(ConfigError, match='no confidence head'):
        read_sources(str(world.target_folder()), PytorchEngineConfig(), speculative)
