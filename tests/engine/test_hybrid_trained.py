"""A Qwen3.5 that has learnt something, with drafts distilled from it: what they guess is often right and often wrong.

How it was made: tests/helpers/hybrid_training.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.engine.build import build_engine
from specdec.messages import PytorchEngineConfig, SpeculativeConfig
from tests.helpers.deepseek_v4_training import language
from tests.helpers.emulated_gpu import as_on_a_gpu
from tests.helpers.engines import Models, Outcome, Settings, drive, generate, load, make_engine, request
from tests.helpers.exactness import Ledger
from tests.helpers.hybrid_training import FOLDER, make

SETTINGS = Settings(session_len=256, max_batch_size=4, page_size=16)
PROMPTS = [language().text(length, 77 + length) for length in (9, 30, 100, 150)]
NEW_TOKENS = 60


@pytest.fixture(scope='module', params=['dflash', 'dspark'])
def models(request: pytest.FixtureRequest) -> Models:
    return load(FOLDER / 'target', FOLDER / request.param, request.param)


def run(models: Models, settings: Settings = SETTINGS, **params: Any) -> list[Outcome]:
    return generate(make_engine(models, settings), [request(p, NEW_TOKENS, **params) for p in PROMPTS])


def mean_accepted_length(found: list[Outcome]) -> float:
    steps = [step for outcome in found for step in outcome.steps]
    mean = sum(emitted for _, emitted in steps) / len(steps)
    print(f'{len(steps)} steps, mean accepted length {mean:.2f}')  # for docs/hybrid.md
    return mean


def accepted(outcome: Outcome) -> list[int]:
    """Tokens of each step; an overlapped run may launch one more step behind the end, which emits nothing."""
    return [emitted for _, emitted in outcome.steps if emitted]


def test_files_are_small():
    assert sum(path.stat().st_size for path in FOLDER.rglob('*') if path.is_file()) < 2 << 20


@pytest.mark.parametrize('params', [{}, {'temperature': 1.0, 'seed': 3}], ids=['greedy', 'sampled'])
def test_drafts_are_accepted_and_rejected(models: Models, ledger: Ledger, params: dict[str, Any]):
    found = run(models, **params)
    for prompt, outcome in zip(PROMPTS, found):
        ledger.same(models, ledger.plain(models, prompt, NEW_TOKENS, **params), outcome)
    assert mean_accepted_length(found) > 2
    assert len({emitted for outcome in found for emitted in accepted(outcome)}) > 3


@pytest.mark.parametrize('on_a_gpu', [False, True])
def test_as_many_are_accepted_whatever_the_way_to_the_prompts_end(models: Models, ledger: Ledger, on_a_gpu: bool):
    """In chunks, behind a cached prefix, padded and overlapped: a state that is not the prefix's would show here."""
    wanted = run(models)
    engine = make_engine(models, replace(SETTINGS, chunk=33))
    engine = as_on_a_gpu(engine) if on_a_gpu else engine
    for turn in range(2):
        found = generate(engine, [request(p, NEW_TOKENS) for p in PROMPTS], [0, 3, 5, 40])
        same = [ledger.same(models, plain, outcome) for plain, outcome in zip(wanted, found)]
        for plain, outcome, equal in zip(wanted, found, same):
            assert not equal or accepted(outcome) == accepted(plain)
        assert [outcome.cached[0] for outcome in found] == ([0, 16, 96, 144] if turn else [0] * 4)


def test_preempted_requests_accept_as_much(models: Models, ledger: Ledger):
    few = replace(SETTINGS, session_len=192, num_pages=14, prefix_caching=False)
    driver = drive(make_engine(models, few))
    found = generate(driver, [request(p, NEW_TOKENS) for p in PROMPTS[:3]], [0, 1, 2])
    assert driver.engine.scheduler.stats.preemptions > 0
    for prompt, outcome in zip(PROMPTS, found):
        ledger.same(models, ledger.plain(models, prompt, NEW_TOKENS), outcome)
    assert mean_accepted_length(found) > 2


def test_bf16():
    """As on a GPU; a near-tie may change a text, which is judged elsewhere."""
    config = PytorchEngineConfig(device_type='cpu', dtype='bfloat16', max_batch_size=4, session_len=256)
    engine = build_engine(str(FOLDER / 'target'), config, SpeculativeConfig('dflash', str(FOLDER / 'dflash')))
    assert engine.info.dtype == 'bfloat16'
    assert mean_accepted_length(generate(engine, [request(p, NEW_TOKENS) for p in PROMPTS])) > 2


@pytest.mark.slow
def test_the_trainer_makes_such_checkpoints(tmp_path: Path):
    make(tmp_path, target_steps=60, draft_steps=160, texts=60)
    found = run(load(tmp_path / 'target', tmp_path / 'dflash', 'dflash'))
    assert mean_accepted_length(found) > 1.15  # it has begun to learn: drafts of noise are hardly ever accepted
