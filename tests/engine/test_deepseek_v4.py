"""DeepSeek-V4 in the engine: with its heads, or with a draft that knows the text, it says what it says without."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.engine.build import build_engine, cache_specs, load_models, read_sources, settle_page_size
from specdec.engine.engine import Engine
from specdec.errors import ConfigError
from specdec.messages import PytorchEngineConfig, SpeculativeConfig
from specdec.models.checkpoint import read_target
from tests.helpers import deepseek_v4 as v4
from tests.helpers.emulated_gpu import as_on_a_gpu, interpreted_kernels
from tests.helpers.engines import Models, Outcome, Settings, World, generate, make_engine, prompt_ids, request
from tests.helpers.exactness import Ledger
from tests.helpers.lengths import Jumping, with_lengths
from tests.helpers.proposers import KnowingProposer, cycling

CPU = torch.device('cpu')
PAGE = 128
SETTINGS = Settings(session_len=384, max_batch_size=3, page_size=PAGE)
SAMPLED = {'temperature': 0.7, 'seed': 11}
PROMPTS = (1, v4.WINDOW + 1, 126)  # the last one passes an entry of ratio 128 while it decodes
NEW_TOKENS = 20


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return v4.write_bundled(tmp_path_factory.mktemp('v4') / 'bundled', v4.build_target(), v4.build_draft())


@pytest.fixture(scope='module')
def models(folder: Path) -> Models:
    config = PytorchEngineConfig(device_type='cpu')
    sources = read_sources(str(folder), config, SpeculativeConfig('dspark'))
    return Models(sources, *load_models(sources, config, sources.target.max_position, CPU, None))


def check(
    models: Models,
    ledger: Ledger,
    settings: Settings = SETTINGS,
    lengths: Sequence[int] = PROMPTS,
    arrivals: Sequence[int] | None = None,
    on_a_gpu: bool = False,
    **params: Any,
) -> list[Outcome]:
    """Prompts of these lengths together; every text equals plain decoding's."""
    engine = make_engine(models, settings)
    return run_and_compare(models, ledger, as_on_a_gpu(engine) if on_a_gpu else engine, lengths, arrivals, **params)


def run_and_compare(
    models: Models,
    ledger: Ledger,
    engine: Engine,
    lengths: Sequence[int],
    arrivals: Sequence[int] | None = None,
    **params: Any,
) -> list[Outcome]:
    prompts = [prompt_ids(n, 5) for n in lengths]
    found = generate(engine, [request(p, NEW_TOKENS, **params) for p in prompts], arrivals)
    plain = {k: v for k, v in params.items() if k != 'draft_sampling'}
    for prompt, outcome in zip(prompts, found):
        ledger.same(models, ledger.plain(models, prompt, NEW_TOKENS, **plain), outcome)
    return found


def knowing(models: Models, ledger: Ledger, num_drafts: int, pattern: Sequence[int], **params: Any) -> Models:
    """A draft that is right about as many tokens as the pattern says."""
    texts = [ledger.plain(models, prompt_ids(n, 5), NEW_TOKENS, **params).text for n in PROMPTS]
    return models.with_proposer(KnowingProposer(models.target, num_drafts, texts, cycling(pattern)))


# ------------------------------------------------------------------------------------------------------ exactness
@pytest.mark.parametrize('num_drafts', [1, 2, 3, 4, 5])
def test_bundled_heads_leave_the_text_alone(models: Models, ledger: Ledger, num_drafts: int):
    found = check(models.with_drafts(num_drafts), ledger, arrivals=[0, 2, 5])
    assert max(drafted for outcome in found for drafted, _ in outcome.steps) == num_drafts


@pytest.mark.parametrize('chunk', [7, 100])
def test_prompts_in_chunks(models: Models, ledger: Ledger, chunk: int):
    whole = check(models, ledger)
    chunked = check(models, ledger, replace(SETTINGS, chunk=chunk))
    assert [outcome.steps for outcome in chunked] == [outcome.steps for outcome in whole]


@pytest.mark.parametrize(('num_drafts', 'overlap'), [(2, 0), (5, 1)])
def test_any_number_of_drafts_is_accepted(models: Models, ledger: Ledger, num_drafts: int, overlap: int):
    pattern = [0, 3, 1, 5, 2, 4, 0, 5]
    found = check(knowing(models, ledger, num_drafts, pattern), ledger, replace(SETTINGS, overlap=overlap))
    assert {emitted - 1 for outcome in found for _, emitted in outcome.steps} >= set(range(num_drafts + 1))


@pytest.mark.parametrize('draft_sampling', ['greedy', 'coupled'])
def test_sampled_text_is_that_of_the_seed(models: Models, ledger: Ledger, draft_sampling: str):
    check(models, ledger, **SAMPLED, draft_sampling=draft_sampling)
    check(knowing(models, ledger, 3, [3, 0, 1, 2], **SAMPLED), ledger, **SAMPLED)


@pytest.mark.parametrize('params', [{}, SAMPLED], ids=['greedy', 'sampled'])
def test_padded_overlapped_steps(models: Models, ledger: Ledger, params: dict[str, float]):
    check(models, ledger, replace(SETTINGS, chunk=50), arrivals=[0, 2, 5], on_a_gpu=True, **params)
    known = knowing(models, ledger, 5, [4, 0, 5, 2], **params)
    check(known, ledger, replace(SETTINGS, chunk=50), arrivals=[3, 0, 1], on_a_gpu=True, **params)


@pytest.mark.slow
def test_kernels_of_a_gpu_in_the_whole_step(models: Models, ledger: Ledger):
    """Every operator that has one, this model's own among them; rings and sums of windows are plain PyTorch."""
    pytest.importorskip('triton')
    prompts = [prompt_ids(n, 5) for n in (5, 17)]
    plain = [ledger.plain(models, p, 6) for p in prompts]
    with interpreted_kernels():
        found = generate(as_on_a_gpu(make_engine(models, SETTINGS)), [request(p, 6) for p in prompts])
    for expected, outcome in zip(plain, found):
        ledger.same(models, expected, outcome)


@pytest.mark.parametrize('on_a_gpu', [False, True])
def test_verify_lengths_that_jump(models: Models, ledger: Ledger, on_a_gpu: bool):
    engine = make_engine(with_lengths(models, 'adaptive'), SETTINGS)
    engine.scheduler.lengths = Jumping(4)
    found = run_and_compare(models, ledger, as_on_a_gpu(engine) if on_a_gpu else engine, PROMPTS, [0, 1, 2])
    assert len({drafted for outcome in found for drafted, _ in outcome.steps}) > 2


@pytest.mark.parametrize('overlap', [0, 1])
def test_preemption(models: Models, ledger: Ledger, overlap: int):
    """Pages for two of three requests: one loses its slot, and all that its rings held is computed again."""
    settings = replace(SETTINGS, num_pages=3, overlap=overlap, chunk=60)
    engine = make_engine(models, settings)
    prompts = [prompt_ids(n, 5) for n in (112, 110, 114)]
    found = generate(engine, [request(p, NEW_TOKENS) for p in prompts], [0, 1, 4])
    assert engine.scheduler.stats.preemptions > 0
    for prompt, outcome in zip(prompts, found):
        ledger.same(models, ledger.plain(models, prompt, NEW_TOKENS), outcome)


@pytest.mark.parametrize('on_a_gpu', [False, True])
def test_prefix_hits(models: Models, ledger: Ledger, on_a_gpu: bool):
    """Rings of a cached prefix are copied with it; text and acceptance are those of a prompt that is computed."""
    base, lengths = prompt_ids(300, 6), (129, 300, 256, 257, 200)
    texts = [base[:n] if n > 200 else (*base[:n], 7, 8) for n in lengths]
    texts.append((*base[:140], *prompt_ids(120, 7)))
    fresh = make_engine(models, replace(SETTINGS, prefix_caching=False))
    wanted = [generate(fresh, [request(text, 8)])[0] for text in texts]
    engine = make_engine(models, replace(SETTINGS, chunk=90))
    engine = as_on_a_gpu(engine) if on_a_gpu else engine
    cached = []
    for text, plain in zip([*texts, *texts], [*wanted, *wanted]):
        [found] = generate(engine, [request(text, 8)])
        ledger.same(models, plain, found)
        assert found.steps[: len(plain.steps)] == plain.steps
        cached += found.cached
    # a copy lies at the last boundary before a prompt's end, and where pages were found without one
    assert cached == [0, 128, 128, 256, 128, 128, *[128, 256, 128, 256, 128, 256]]
    engine.scheduler.check()


def test_prefix_hits_of_many_at_once(models: Models, ledger: Ledger):
    base = prompt_ids(150, 6)
    prompts = [(*base[:n], *prompt_ids(4 + i, 8)) for i, n in enumerate((150, 128, 140, 135, 60, 150))]
    engine = make_engine(models, replace(SETTINGS, num_pages=8, chunk=64))
    found = generate(engine, [request(p, NEW_TOKENS) for p in prompts], [0, 6, 6, 7, 9, 12])
    for prompt, outcome in zip(prompts, found):
        ledger.same(models, ledger.plain(models, prompt, NEW_TOKENS), outcome)
    assert max(outcome.cached[0] for outcome in found) == 128


def test_copies_that_cannot_be_used_are_refused(world: World):
    config = PytorchEngineConfig(device_type='cpu', prefix_cache_state_budget=3, num_gpu_blocks=4, session_len=64)
    with pytest.raises(ConfigError, match='keeps nothing by slot'):
        build_engine(str(world.target_folder()), config)


def test_a_slot_serves_many_requests(models: Models, ledger: Ledger):
    """One slot, short after long: rings of the tenant before are not looked at."""
    engine = make_engine(models, replace(SETTINGS, max_batch_size=1))
    for length in (126, 1, 17, 126):
        [outcome] = generate(engine, [request(prompt_ids(length, 5), NEW_TOKENS)])
        ledger.same(models, ledger.plain(models, prompt_ids(length, 5), NEW_TOKENS), outcome)


# --------------------------------------------------------------------------------------------------------- memory
def test_the_memory_plan_is_what_is_allocated(folder: Path):
    config = PytorchEngineConfig(device_type='cpu', max_batch_size=2, session_len=300, num_gpu_blocks=4)
    engine = build_engine(str(folder), config, SpeculativeConfig('dspark'))
    memory, model = engine.memory, engine.agent.model
    assert memory.page_size == 256
    layers = model.caches.target.layers
    partials = [p for layer in layers for p in (layer.entries, layer.keys) if p is not None]
    pages = [p.pages for p in partials]
    every = [*model.caches.target.rings, *model.caches.draft.windows]
    rings = [ring.rows for ring in every]
    assert memory.num_pages == 5
    assert memory.cache_bytes == num_bytes(pages)
    per_slot = sum(spec.bytes_per_slot for spec in cache_specs(model.target, model.proposer))
    assert num_bytes(rings) == 3 * per_slot
    assert memory.state_bytes >= num_bytes(rings)
    assert memory.num_states == 4
    assert num_bytes([ring.saved for ring in every]) == 5 * memory.bytes_per_state


def num_bytes(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.itemsize for t in tensors)


def test_page_sizes(folder: Path):
    target = read_target(folder)
    assert settle_page_size(PytorchEngineConfig(), target) == 256
    assert settle_page_size(PytorchEngineConfig(block_size=128), target) == 128
    with pytest.raises(ConfigError, match='multiple of 128'):
        settle_page_size(PytorchEngineConfig(block_size=192), target)


# ------------------------------------------------------------------------------------------------------- refusals
def sources_of(folder: Path, **settings: Any) -> Any:
    return read_sources(str(folder), PytorchEngineConfig(device_type='cpu'), SpeculativeConfig(**settings))


def test_as_many_drafts_as_the_heads_were_trained_for(folder: Path):
    assert sources_of(folder, method='dspark').num_drafts == v4.BLOCK
    assert sources_of(folder, method='dspark', num_speculative_tokens=2).num_drafts == 2
    with pytest.raises(ConfigError, match='at most 5'):
        sources_of(folder, method='dspark', num_speculative_tokens=6)


def test_what_the_heads_are_not_is_refused_by_name(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="use 'dspark'"):
        sources_of(folder, method='dflash')
    with pytest.raises(ConfigError, match='leave it empty'):
        sources_of(folder, method='dspark', model=str(tmp_path))
    plain = v4.write(tmp_path / 'plain', v4.config(), {'embed.weight': torch.zeros(1)})
    with pytest.raises(ConfigError, match='has no DSpark heads'):
        sources_of(plain, method='dspark')
    classic = v4.write(tmp_path / 'classic', v4.config(), {'mtp.0.e_proj.weight': torch.zeros(1)})
    with pytest.raises(ConfigError, match='classic MTP layer'):
        sources_of(classic, method='dspark')


def test_heads_are_not_read_without_speculation(folder: Path, ledger: Ledger, models: Models):
    config = PytorchEngineConfig(device_type='cpu', max_batch_size=1, session_len=300, num_gpu_blocks=2)
    engine = build_engine(str(folder), config)
    [outcome] = generate(engine, [request(prompt_ids(17, 5), NEW_TOKENS)])
    ledger.same(models, ledger.plain(models, prompt_ids(17, 5), NEW_TOKENS), outcome)
    assert engine.info.num_drafts == 0
