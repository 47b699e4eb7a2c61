"""Qwen3.5 in the engine: whatever drafts are right or wrong, text and states are those of plain decoding."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from specdec.agent.state import LENGTH
from specdec.engine.build import build_engine, cache_specs
from specdec.engine.engine import Engine
from specdec.errors import CheckpointError
from specdec.layers.recurrent import HybridCache
from specdec.messages import PytorchEngineConfig, SpeculativeConfig
from specdec.models.checkpoint import read_draft, read_target
from tests.helpers import checkpoints as tiny
from tests.helpers.emulated_gpu import as_on_a_gpu, interpreted_kernels
from tests.helpers.engines import (
    DRAFTS,
    PAGE,
    Driver,
    Models,
    Outcome,
    Settings,
    drive,
    generate,
    load,
    make_engine,
    prompt_ids,
    request,
    write_draft,
)
from tests.helpers.exactness import Ledger
from tests.helpers.hybrid import KINDS, write_for_engines
from tests.helpers.hybrid_reference import Reference
from tests.helpers.lengths import Jumping, with_lengths
from tests.helpers.proposers import KnowingProposer, cycling

SETTINGS = Settings(session_len=160, max_batch_size=3)
SAMPLED = {'temperature': 0.8, 'seed': 11}
PROMPTS = (1, 29, 70)
NEW_TOKENS = 24


class Family:
    """A target of every kind, with every draft; loaded when asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._models: dict[tuple[str, str | None], Models] = {}

    def target(self, kind: str = 'dense') -> Path:
        folder = self.root / kind
        return folder if folder.exists() else write_for_engines(folder, kind)

    def models(self, draft: str | None = None, kind: str = 'dense') -> Models:
        if (kind, draft) not in self._models:
            folder = None
            if draft is not None:
                folder = write_draft(self.root / f'{kind}-{draft}', draft, self.target(kind))
            self._models[kind, draft] = load(self.target(kind), folder, (draft or 'dflash').split('_')[0])
        return self._models[kind, draft]


@pytest.fixture(scope='module')
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp('hybrid'))


def check(
    models: Models,
    ledger: Ledger,
    settings: Settings = SETTINGS,
    arrivals: Sequence[int] | None = None,
    on_a_gpu: bool = False,
    **params: Any,
) -> list[Outcome]:
    """Prompts of three lengths together; every text equals plain decoding's."""
    engine = make_engine(models, settings)
    return run_and_compare(models, ledger, as_on_a_gpu(engine) if on_a_gpu else engine, arrivals, **params)


def run_and_compare(
    models: Models, ledger: Ledger, engine: Engine, arrivals: Sequence[int] | None = None, **params: Any
) -> list[Outcome]:
    prompts = [prompt_ids(n, 5) for n in PROMPTS]
    found = generate(engine, [request(p, NEW_TOKENS, **params) for p in prompts], arrivals)
    plain = {k: v for k, v in params.items() if k != 'draft_sampling'}
    for prompt, outcome in zip(prompts, found):
        ledger.same(models, ledger.plain(models, prompt, NEW_TOKENS, **plain), outcome)
    return found


def knowing(models: Models, ledger: Ledger, num_drafts: int, pattern: Sequence[int], **params: Any) -> Models:
    """A draft that is right about as many tokens as the pattern says."""
    texts = [ledger.plain(models, prompt_ids(n, 5), NEW_TOKENS, **params).text for n in PROMPTS]
    return models.with_proposer(KnowingProposer(models.target, num_drafts, texts, cycling(pattern)))


def accepted(outcome: Outcome) -> list[int]:
    """Tokens of each step; an overlapped run may launch one more step behind the end, which emits nothing."""
    return [emitted for _, emitted in outcome.steps if emitted]


# ------------------------------------------------------------------------------------------------------ exactness
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('draft', ['dflash_fill_in', 'dspark_vanilla'])
def test_drafts_leave_the_text_alone(family: Family, ledger: Ledger, kind: str, draft: str):
    found = check(family.models(draft, kind), ledger, arrivals=[0, 2, 5])
    assert draft == 'dflash_fill_in' or sum(outcome.accepted for outcome in found) > 0  # that one is random


@pytest.mark.parametrize('draft', sorted(set(DRAFTS) - {'dflash_fill_in', 'dspark_vanilla'}))
def test_every_layout_of_drafts(family: Family, ledger: Ledger, draft: str):
    check(family.models(draft), ledger)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('overlap', [0, 1])
def test_any_number_of_drafts_is_accepted(family: Family, ledger: Ledger, kind: str, overlap: int):
    models = knowing(family.models(kind=kind), ledger, 5, [0, 3, 1, 5, 2, 4, 0, 5])
    found = check(models, ledger, replace(SETTINGS, overlap=overlap))
    assert {emitted - 1 for outcome in found for _, emitted in outcome.steps} >= set(range(6))


@pytest.mark.parametrize('params', [{}, SAMPLED], ids=['greedy', 'sampled'])
def test_padded_overlapped_steps(family: Family, ledger: Ledger, params: dict[str, Any]):
    check(family.models('dspark_vanilla'), ledger, replace(SETTINGS, chunk=20), [0, 2, 5], on_a_gpu=True, **params)
    known = knowing(family.models(), ledger, 4, [4, 0, 1, 2], **params)
    check(known, ledger, replace(SETTINGS, chunk=20), [3, 0, 1], on_a_gpu=True, **params)


@pytest.mark.parametrize('draft_sampling', ['greedy', 'coupled'])
def test_sampled_text_is_that_of_the_seed(family: Family, ledger: Ledger, draft_sampling: str):
    check(family.models('dspark_vanilla'), ledger, **SAMPLED, draft_sampling=draft_sampling)


@pytest.mark.parametrize('on_a_gpu', [False, True])
def test_verify_lengths_that_jump(family: Family, ledger: Ledger, on_a_gpu: bool):
    engine = make_engine(with_lengths(family.models('dspark_vanilla'), 'adaptive'), SETTINGS)
    engine.scheduler.lengths = Jumping(4)
    engine = as_on_a_gpu(engine) if on_a_gpu else engine
    found = run_and_compare(family.models('dspark_vanilla'), ledger, engine, [0, 1, 2])
    assert len({drafted for outcome in found for drafted, _ in outcome.steps}) > 2


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['dense', 'moe'])
def test_kernels_of_a_gpu_in_the_whole_step(family: Family, ledger: Ledger, kind: str):
    """Every operator that has one; prompt chunks of the recurrence are plain PyTorch."""
    pytest.importorskip('triton')
    models = family.models('dspark_vanilla', kind)
    prompts = [prompt_ids(n, 5) for n in (5, 17)]
    plain = [ledger.plain(models, p, 8) for p in prompts]
    with interpreted_kernels():
        found = generate(as_on_a_gpu(make_engine(models, SETTINGS)), [request(p, 8) for p in prompts])
    for expected, outcome in zip(plain, found):
        ledger.same(models, expected, outcome)


# --------------------------------------------------------------------------------- states, whatever was accepted
class Watch:
    """Compares a running engine's states with those of a token-by-token run in fp64."""

    def __init__(self, folder: Path) -> None:
        self.reference = Reference(folder)
        self.known: dict[tuple[int, ...], list[list[Tensor]]] = {}
        self.compared = 0

    def learn(self, text: Sequence[int]) -> None:
        if tuple(text) not in self.known:
            self.known[tuple(text)] = self.reference.run(text)[1]

    def check(self, driver: Driver) -> None:
        engine = driver.engine
        model = engine.agent.model
        for sequence in engine.scheduler.running:
            length = int(model.state.ints[sequence.slot, LENGTH])
            if sequence.prefilling or not length:
                continue
            begun = tuple(sequence.tokens[:length])
            states = next((s for text, s in self.known.items() if text[:length] == begun), None)
            assert states is not None, 'a text that plain decoding does not give'
            for mine, theirs in zip(folded(model.caches.target, sequence.slot, length), states[length - 1]):
                assert float((mine.double() - theirs).abs().max() / theirs.abs().max()) < 1e-5
            self.compared += 1


def folded(cache: HybridCache, slot: int, length: int) -> list[Tensor]:
    """A slot's states behind `length` tokens, without touching the slot."""
    kept = [layer.delta.state.clone() for layer in cache.states.layers]
    windows = [layer.windows.clone() for layer in cache.states.layers]
    lengths = cache.states.lengths.clone()
    slots = torch.tensor([slot])
    cache.states.fold(slots, length - lengths[slots])
    assert int(cache.states.lengths[slot]) == length
    found = [layer.delta.state[slot].clone() for layer in cache.states.layers]
    for layer, state, window in zip(cache.states.layers, kept, windows):
        layer.delta.state.copy_(state)
        layer.windows.copy_(window)
    cache.states.lengths.copy_(lengths)
    return found


@pytest.fixture(scope='module')
def watch(family: Family) -> Watch:
    return Watch(family.target())


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_states_and_texts_under_any_acceptance(family: Family, ledger: Ledger, watch: Watch, data: st.DataObject):
    """Any pattern of right drafts, caps from 0 on, joins, leaves and chunk sizes."""
    plain = family.models()
    num_drafts = data.draw(st.integers(1, 5), 'K')
    pattern = data.draw(st.lists(st.integers(0, num_drafts), min_size=1, max_size=9), 'right')
    asked, arrivals = [], []
    for _ in range(data.draw(st.integers(1, 4), 'requests')):
        prompt = prompt_ids(data.draw(st.sampled_from(PROMPTS), 'prompt'), 5)
        tokens = data.draw(st.sampled_from([3, 9, NEW_TOKENS]), 'tokens')
        cap = data.draw(st.sampled_from([None, None, 0, 1]), 'cap')
        asked.append(request(prompt, tokens, max_drafts=cap))
        arrivals.append(data.draw(st.integers(0, 8), 'arrival'))
    texts = [ledger.plain(plain, prompt_ids(n, 5), NEW_TOKENS).text for n in PROMPTS]
    for text in texts:
        watch.learn(text)
    models = plain.with_proposer(KnowingProposer(plain.target, num_drafts, texts, cycling(pattern)))
    chunk = data.draw(st.sampled_from([512, 7, 1]), 'chunk')
    driver = drive(make_engine(models, replace(SETTINGS, chunk=chunk)))
    due = sorted(zip(arrivals, range(len(asked))))
    step = 0
    while due or driver.engine.has_work():
        while due and due[0][0] <= step:
            driver.add(asked[due.pop(0)[1]])
        driver.step()
        watch.check(driver)
        step += 1
    for one in asked:
        expected = ledger.plain(plain, one.prompt_ids, one.params.max_new_tokens)
        ledger.same(plain, expected, driver.outcomes[one.request_id])


def test_three_hundred_tokens(family: Family, ledger: Ledger, watch: Watch):
    """Accepted 0 to K in mixed orders: text, and state behind every step."""
    models, prompt = family.models(), prompt_ids(29, 5)
    text = ledger.plain(models, prompt, 300).text
    watch.learn(text)
    right = [a for b in range(5) for c in range(5) for a in (b, c)]
    known = models.with_proposer(KnowingProposer(models.target, 4, [text], cycling(right)))
    driver = drive(make_engine(known, replace(SETTINGS, session_len=340, max_batch_size=1)))
    driver.add(asked := request(prompt, 300))
    before = watch.compared
    while driver.engine.has_work():
        driver.step()
        watch.check(driver)
    outcome = driver.outcomes[asked.request_id]
    ledger.same(models, ledger.plain(models, prompt, 300), outcome)
    assert len(set(pairwise(accepted(outcome)))) > 12
    assert watch.compared - before > 60


# ------------------------------------------------------------------------------------- chunks, preemption, prefixes
@pytest.mark.parametrize('chunk', [7, 33])
def test_prompts_in_chunks(family: Family, ledger: Ledger, chunk: int):
    models = family.models('dspark_vanilla')
    whole = check(models, ledger)
    chunked = check(models, ledger, replace(SETTINGS, chunk=chunk))
    assert [outcome.steps for outcome in chunked] == [outcome.steps for outcome in whole]


@pytest.mark.parametrize('overlap', [0, 1])
def test_preemption(family: Family, ledger: Ledger, overlap: int):
    """Pages for two of three requests: one loses its slot, and its state is computed again."""
    models = family.models('dspark_vanilla')
    driver = drive(make_engine(models, replace(SETTINGS, num_pages=40, overlap=overlap, chunk=33)))
    prompts = [prompt_ids(n, 5) for n in (36, 40, 44)]
    found = generate(driver, [request(p, NEW_TOKENS) for p in prompts], [0, 1, 4])
    assert driver.engine.scheduler.stats.preemptions > 0
    for prompt, outcome in zip(prompts, found):
        ledger.same(models, ledger.plain(models, prompt, NEW_TOKENS), outcome)
    driver.engine.scheduler.check()


def test_aborts_leave_the_others_alone(family: Family, ledger: Ledger):
    models = family.models('dspark_vanilla')
    driver = drive(make_engine(models, replace(SETTINGS, overlap=1)))
    asked = [request(prompt_ids(n, 5), NEW_TOKENS) for n in (*PROMPTS, 40)]
    for one in asked[:3]:
        driver.add(one)
    for _ in range(4):
        driver.step()
    driver.engine.scheduler.abort([asked[1].request_id])
    driver.add(asked[3])  # takes the slot, and a state that somebody left half way
    driver.run()
    for one in (asked[0], asked[2], asked[3]):
        expected = ledger.plain(models, one.prompt_ids, NEW_TOKENS)
        ledger.same(models, expected, driver.outcomes[one.request_id])


@pytest.mark.parametrize('on_a_gpu', [False, True])
def test_prefix_hits(family: Family, ledger: Ledger, on_a_gpu: bool):
    """A cached prefix brings its state along; text and acceptance are those of a prompt that is computed."""
    models, base = family.models('dspark_vanilla'), prompt_ids(60, 6)
    texts = [base[:41], base, (*base[:30], 1, 2, 3), (*base[:30], 4, 5, 6), base[:41]]
    fresh = make_engine(models, replace(SETTINGS, prefix_caching=False))
    wanted = [generate(fresh, [request(text, 8)])[0] for text in texts]
    engine = make_engine(models, replace(SETTINGS, chunk=25))
    engine = as_on_a_gpu(engine) if on_a_gpu else engine
    cached = []
    for text, plain in zip(texts, wanted):
        [found] = generate(engine, [request(text, 8)])
        ledger.same(models, plain, found)
        assert accepted(found) == accepted(plain)
        cached += found.cached
    # a copy lies at the last boundary before a prompt's end, and where pages were found without one
    assert cached == [0, 40, 0, 28, 40]
    engine.scheduler.check()


def test_the_third_of_three_prompts_starts_at_the_branch(family: Family, ledger: Ledger):
    models, shared = family.models('dspark_vanilla'), prompt_ids(1000, 6)
    driver = drive(make_engine(models, Settings(session_len=1100, max_batch_size=1, chunk=300, num_pages=900)))
    prompts = [(*shared, *prompt_ids(20 + i, 7 + i)) for i in range(3)]
    found = [generate(driver, [request(p, 8)])[0] for p in prompts]
    assert [outcome.cached for outcome in found] == [[0], [0], [1000]]
    for prompt, outcome in zip(prompts, found):
        ledger.same(models, ledger.plain(models, prompt, 8), outcome)
    driver.engine.scheduler.check()


def test_few_copies_go_by_use(family: Family):
    """A budget of two: what was used last is kept."""
    config = PytorchEngineConfig(
        device_type='cpu', max_batch_size=2, session_len=160, num_gpu_blocks=99, block_size=PAGE,
        prefix_cache_state_budget=2,
    )  # fmt: skip
    engine = build_engine(str(family.target()), config)
    assert engine.memory.num_states == 2
    prompts = [prompt_ids(30, seed) for seed in (20, 21, 22)]
    cached = [generate(engine, [request(prompts[i], 4)])[0].cached[0] for i in (0, 1, 0, 2, 0, 1)]
    assert cached == [0, 0, 28, 0, 28, 0]


# --------------------------------------------------------------------------------------------------------- memory
def num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.itemsize for t in tensors)


@pytest.mark.parametrize('draft', [None, 'dflash_fill_in'])
def test_memory_is_stated_planned_and_allocated(family: Family, draft: str | None):
    config = PytorchEngineConfig(device_type='cpu', max_batch_size=2, session_len=64, num_gpu_blocks=4)
    folder = family.models(draft).sources.draft_folder
    speculative = None if draft is None else SpeculativeConfig('dflash', str(folder))
    engine = build_engine(str(family.target()), config, speculative)
    memory, model = engine.memory, engine.agent.model
    cache, K = model.caches.target, model.proposer.num_drafts
    states = cache.states
    by_slot = [states.lengths, states.parity]
    for layer in states.layers:
        by_slot += [layer.delta.state, layer.delta.inputs, layer.delta.gates, layer.windows]
    L, HK, HV, dk, dv, W, s = 4, 2, 4, 8, 16, 4, 4
    C = 2 * HK * dk + HV * dv
    pending = 2 * (K + 1) * (HK * dk + HV * dv) * s + 16 * (K + 1) * HV
    stated = L * (4 * HV * dk * dv + pending + 2 * (W + K) * C * s) + 16
    specs = cache_specs(model.target, model.proposer)
    assert sum(spec.bytes_per_slot for spec in specs) == stated
    assert num_bytes(by_slot) == 3 * stated
    assert memory.state_bytes >= 3 * stated
    pages = [*cache.pages.k, *cache.pages.v]
    if draft is not None:
        pages += [*model.caches.draft.k, *model.caches.draft.v]
    assert num_bytes(pages) == memory.cache_bytes
    saved = [x for layer in states.layers for x in (layer.saved_states, layer.saved_windows)]
    assert memory.bytes_per_state == L * (4 * HV * dk * dv + (W - 1) * C * s)
    assert num_bytes(saved) == (memory.num_states + 1) * memory.bytes_per_state


# ------------------------------------------------------------------------------------------------------- drafts
def test_inherited_keys_are_noise(family: Family, tmp_path: Path):
    """A draft's config that was copied from its target's says things that its training never obeyed."""
    noise = {
        'rope_parameters': {
            'rope_type': 'default',
            'rope_theta': 10000.0,
            'partial_rotary_factor': 0.25,
            'mrope_section': [1, 1, 0],
            'mrope_interleaved': True,
        },
        'attn_output_gate': True,
        'linear_num_value_heads': 4,
    }
    plain = write_draft(tmp_path / 'plain', 'dflash_fill_in', family.target())
    weights = load_file(plain / 'model.safetensors')
    target = read_target(family.target())
    noisy = tiny.write(tmp_path / 'noisy', tiny.zlab_config(**noise), weights)
    assert read_draft(noisy, target) == read_draft(plain, target)


def test_drafts_with_gated_attention_are_refused_by_name(family: Family, tmp_path: Path):
    folder = tiny.write(tmp_path, tiny.deepspec_config(architectures=['Qwen35DSparkModel']), {})
    with pytest.raises(CheckpointError, match=r'Qwen3\.5-native'):
        read_draft(folder, read_target(family.target()))
