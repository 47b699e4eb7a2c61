"""A DeepSeek-V4 that has learnt something, quantised as releases are: its heads guess most of what it says.

How it was made: tests/helpers/deepseek_v4_training.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.engine.build import build_engine, load_models, read_sources
from specdec.messages import PytorchEngineConfig, SpeculativeConfig
from specdec.models.checkpoint import tensor_shapes
from tests.helpers.deepseek_v4_training import FOLDER, language, make
from tests.helpers.emulated_gpu import as_on_a_gpu
from tests.helpers.engines import Models, Outcome, Settings, generate, make_engine, request
from tests.helpers.exactness import Ledger

SETTINGS = Settings(session_len=384, max_batch_size=4, page_size=128)
PROMPTS = [language().text(length, 77 + length) for length in (9, 30, 100, 150)]
NEW_TOKENS = 60


def trained(folder: Path = FOLDER, **settings: Any) -> Models:
    config = PytorchEngineConfig(device_type='cpu', **settings)
    sources = read_sources(str(folder), config, SpeculativeConfig('dspark'))
    loaded = load_models(sources, config, sources.target.max_position, torch.device('cpu'), None)
    return Models(sources, *loaded)


@pytest.fixture(scope='module')
def models() -> Models:
    return trained()


def run(models: Models, **params: Any) -> list[Outcome]:
    return generate(make_engine(models, SETTINGS), [request(p, NEW_TOKENS, **params) for p in PROMPTS])


def mean_accepted_length(found: list[Outcome]) -> float:
    steps = [step for outcome in found for step in outcome.steps]
    mean = sum(emitted for _, emitted in steps) / len(steps)
    print(f'{len(steps)} steps, mean accepted length {mean:.2f}')  # for docs/deepseek_v4.md
    return mean


def test_it_is_stored_as_releases_are():
    stored = {info.dtype for info in tensor_shapes(FOLDER).values()}
    assert stored >= {'F8_E4M3', 'F8_E8M0', 'I8', 'BF16', 'F32', 'I64'}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2 << 20


def test_most_drafts_are_accepted(models: Models, ledger: Ledger):
    found = run(models)
    for prompt, outcome in zip(PROMPTS, found):
        ledger.same(models, ledger.plain(models, prompt, NEW_TOKENS), outcome)
    assert mean_accepted_length(found) > 2


@pytest.mark.parametrize(('chunk', 'on_a_gpu'), [(7, False), (100, True)])
def test_as_many_are_accepted_whatever_the_way_to_the_prompts_end(models: Models, chunk: int, on_a_gpu: bool):
    """In chunks, behind a cached prefix, padded and overlapped: a hole in the draft's rings would show here."""
    wanted = [outcome.steps for outcome in run(models)]
    engine = make_engine(models, replace(SETTINGS, chunk=chunk))
    engine = as_on_a_gpu(engine) if on_a_gpu else engine
    for turn in range(2):
        found = generate(engine, [request(p, NEW_TOKENS) for p in PROMPTS], [0, 3, 5, 40])
        assert [accepted(outcome.steps) for outcome in found] == [accepted(steps) for steps in wanted]
        assert [outcome.cached[0] for outcome in found] == [0, 0, 0, 128 if turn else 0]


def accepted(steps: list[tuple[int, int]]) -> list[int]:
    """Tokens of each step; an overlapped run may launch one more step behind the end, which emits nothing."""
    return [emitted for _, emitted in steps if emitted]


@pytest.mark.parametrize('num_drafts', [1, 3])
def test_fewer_drafts(models: Models, ledger: Ledger, num_drafts: int):
    found = run(models.with_drafts(num_drafts))
    for prompt, outcome in zip(PROMPTS, found):
        ledger.same(models, ledger.plain(models, prompt, NEW_TOKENS), outcome)
    assert 1.5 < mean_accepted_length(found) <= 1 + num_drafts


@pytest.mark.parametrize(
    'rule', [{'verify_length': 'adaptive'}, {'verify_length': 'threshold', 'confidence_threshold': 0.9}], ids=str
)
def test_the_confidence_head_decides_how_many_are_verified(models: Models, ledger: Ledger, rule: dict[str, Any]):
    config = PytorchEngineConfig(device_type='cpu', max_batch_size=4, session_len=384, num_gpu_blocks=8)
    engine = build_engine(str(FOLDER), config, SpeculativeConfig('dspark', **rule))
    found = generate(engine, [request(p, NEW_TOKENS) for p in PROMPTS])
    for prompt, outcome in zip(PROMPTS, found):
        ledger.same(models, ledger.plain(models, prompt, NEW_TOKENS), outcome)
    drafted = [drafted for outcome in found for drafted, _ in outcome.steps]
    assert len(set(drafted)) > 1
    assert mean_accepted_length(found) > 1.5  # with what adaptive lengths cost here, more may not pay


def test_sampled(models: Models, ledger: Ledger):
    params = {'temperature': 1.0, 'seed': 3}
    found = run(models, **params)
    for prompt, outcome in zip(PROMPTS, found):
        ledger.same(models, ledger.plain(models, prompt, NEW_TOKENS, **params), outcome)
    assert mean_accepted_length(found) > 2


def test_packed_experts(ledger: Ledger, models: Models, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr('specdec.models.deepseek_v4.moe.keeps_packed', lambda _: True)
    for prompt, outcome in zip(PROMPTS, run(trained())):
        ledger.same(models, ledger.plain(models, prompt, NEW_TOKENS), outcome)


def test_bf16():
    """As on a GPU; a near-tie may change a text, which is judged elsewhere."""
    config = PytorchEngineConfig(device_type='cpu', dtype='bfloat16', max_batch_size=4, session_len=300)
    engine = build_engine(str(FOLDER), config, SpeculativeConfig('dspark'))
    assert engine.info.dtype == 'bfloat16'
    assert mean_accepted_length(generate(engine, [request(p, NEW_TOKENS) for p in PROMPTS])) > 2


@pytest.mark.slow
def test_the_trainer_makes_such_a_checkpoint(tmp_path: Path):
    make(tmp_path / 'made', target_steps=60, draft_steps=80)
    assert mean_accepted_length(run(trained(tmp_path / 'made'))) > 1.5
