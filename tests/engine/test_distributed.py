"""Ranks that share every layer: the same text as one process, and an end with its cause when one of them fails."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from specdec.engine.build import build_engine, read_sources
from specdec.engine.engine import Engine
from specdec.engine.process_client import BuildEngine, ProcessClient
from specdec.errors import ConfigError, EngineError
from specdec.layers.parallel import ParallelGroup
from specdec.messages import PytorchEngineConfig, SpeculativeConfig
from specdec.models.checkpoint import read_target
from specdec.models.qwen3 import Qwen3Target
from tests.helpers.engines import (
    DRAFTS,
    PAGE,
    Outcome,
    World,
    drive,
    generate,
    make_engine,
    prompt_ids,
    request,
    write_draft,
)
from tests.helpers.exactness import Ledger

NEW_TOKENS = 24
PROMPTS = [prompt_ids(n, 21) for n in (1, 2 * PAGE, 19)]
SAMPLED = {'temperature': 0.9, 'top_k': 30, 'top_p': 0.95, 'seed': 77, 'draft_sampling': 'coupled'}
PENALISED = {'repetition_penalty': 1.3, 'presence_penalty': 0.2}


def settings(tp: int, **changes: Any) -> PytorchEngineConfig:
    return PytorchEngineConfig(
        **{
            'tp': tp,
            'device_type': 'cpu',
            'block_size': PAGE,
            'max_batch_size': 4,
            'max_prefill_token_num': 9,
            'session_len': 128,
            'rank_timeout': 30.0,
            **changes,
        }
    )


@contextmanager
def engine_of(
    world: World, tp: int, draft: str | None = None, target: str = 'dense', lengths: str = 'fixed', **changes: Any
) -> Iterator[Engine]:
    speculative = None
    if draft is not None:
        folder = world.draft_folder(draft, target)
        speculative = SpeculativeConfig(draft.split('_')[0], str(folder), verify_length=lengths)
    engine = build_engine(str(world.target_folder(target)), settings(tp, **changes), speculative)
    try:
        yield engine
    finally:
        engine.close()


def compare(
    world: World, ledger: Ledger, engine: Engine, draft: str | None, target: str, **params: Any
) -> list[Outcome]:
    models = world.models(draft, target=target)
    plain = {name: value for name, value in params.items() if name != 'draft_sampling'}
    for _ in range(2):  # cold, then with prefix hits
        found = generate(drive(engine), [request(p, NEW_TOKENS, **params) for p in PROMPTS], [0, 1, 4])
        for prompt, outcome in zip(PROMPTS, found):
            ledger.same(models, ledger.plain(models, prompt, NEW_TOKENS, **plain), outcome)
    return found


CASES = [
    (2, None, 'dense'),
    (2, 'dspark_vanilla', 'dense'),
    (2, 'dflash_fill_in', 'moe'),
]
MORE = [
    (2, 'dspark_fill_in_d2t', 'dense'),
    (2, 'dspark_gated', 'sliding'),
    (2, 'dspark_rnn', 'moe'),
    (4, None, 'moe'),
    (4, 'dspark_vanilla', 'dense'),  # key heads on two ranks each, a vocabulary that four does not divide
    (4, 'dflash_sliding', 'moe'),
]


@pytest.mark.parametrize(
    ('tp', 'draft', 'target'), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_text_and_acceptance_of_one_process(
    world: World, ledger: Ledger, tp: int, draft: str | None, target: str
) -> None:
    with engine_of(world, tp, draft, target) as engine:
        for params in ({}, SAMPLED, PENALISED):
            found = compare(world, ledger, engine, draft, target, **params)
            alone = generate(
                make_engine(world.models(draft, target=target)), [request(PROMPTS[2], NEW_TOKENS, **params)]
            )
            assert abs(found[2].mean_accepted_length - alone[0].mean_accepted_length) < 1e-9


@pytest.mark.slow
def test_lengths_that_adapt_and_preemption(world: World, ledger: Ledger) -> None:
    with engine_of(world, 2, 'dspark_vanilla', lengths='adaptive') as engine:
        compare(world, ledger, engine, 'dspark_vanilla', 'dense')
        driver = drive(engine)
        asked = [request(p, NEW_TOKENS) for p in PROMPTS]
        for one in asked:
            driver.add(one)
        for step in range(200):
            driver.step()
            if step % 3 == 1 and engine.scheduler.running:
                engine.scheduler._preempt(engine.scheduler.running[-1])
            if not engine.has_work():
                break
        models = world.models('dspark_vanilla')
        for prompt, one in zip(PROMPTS, asked):
            outcome = driver.outcomes[one.request_id]
            ledger.same(models, ledger.plain(models, prompt, NEW_TOKENS), outcome)


# ---------------------------------------------------------------------------------------------------------- failures
def run_into_failure(engine: Engine, seconds: float) -> str:
    start = time.monotonic()
    try:
        while time.monotonic() < start + seconds:
            if not engine.has_work():
                engine.add(request(PROMPTS[0], 100))
            engine.step()
    except EngineError as error:
        assert time.monotonic() < start + seconds
        return str(error)
    raise AssertionError('the engine goes on without a rank')


def test_a_rank_that_is_killed_ends_the_engine_with_its_cause(world: World) -> None:
    with engine_of(world, 2, 'dspark_vanilla') as engine:
        [process] = engine.ranks._processes
        engine.add(request(PROMPTS[0], 100))
        engine.step()
        os.kill(process.pid, signal.SIGKILL)
        assert run_into_failure(engine, 10) == 'rank 1 ended unexpectedly (killed by SIGKILL)'
    assert not process.is_alive()


def test_a_rank_that_stops_is_not_waited_for_for_ever(world: World) -> None:
    with engine_of(world, 2, rank_timeout=4.0) as engine:
        [process] = engine.ranks._processes
        engine.add(request(PROMPTS[0], 100))
        engine.step()
        os.kill(process.pid, signal.SIGSTOP)
        assert 'rank_timeout=4' in run_into_failure(engine, 15)
        os.kill(process.pid, signal.SIGCONT)
    assert not process.is_alive()


@pytest.mark.slow
def test_an_idle_engine_process_ends_when_a_rank_dies(world: World) -> None:
    build = BuildEngine(str(world.target_folder()), settings(2), None)
    client = ProcessClient(build, spawns=True)
    try:
        client.start(lambda _: None)
        [rank] = [
            child.pid
            for child in psutil.Process(client.process.pid).children()
            if 'spawn_main' in ' '.join(child.cmdline())
        ]
        os.kill(rank, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while client.failure is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert client.failure is not None
    finally:
        client.close()


# --------------------------------------------------------------------------------------------------------- bad input
def test_refused_sizes(world: World) -> None:
    for tp, words in ((3, 'num_attention_heads'), (8, 'num_attention_heads')):
        with pytest.raises(ConfigError, match=words):
            read_sources(str(world.target_folder()), settings(tp), None)
    with pytest.raises(ConfigError, match='tp=0'):
        settings(0)
    with pytest.raises(ConfigError, match='rank_timeout'):
        settings(2, rank_timeout=0.0)


def test_a_draft_is_checked_too(world: World, tmp_path: Path) -> None:
    DRAFTS['narrow'] = {**DRAFTS['dflash_fill_in'], 'intermediate_size': 25}
    try:
        folder = write_draft(tmp_path / 'narrow', 'narrow', world.target_folder())
    finally:
        del DRAFTS['narrow']
    with pytest.raises(ConfigError, match="draft's intermediate_size"):
        read_sources(str(world.target_folder()), settings(2), SpeculativeConfig('dflash', str(folder)))


@pytest.mark.parametrize('target', ['dense', 'moe'])
@pytest.mark.parametrize('tp', [2, 4])
def test_each_rank_holds_its_share(world: World, target: str, tp: int) -> None:
    config = read_target(world.target_folder(target))

    def elements(group: ParallelGroup) -> int:
        """Of what is shared out; norms, routers and the like every rank has whole."""
        model = Qwen3Target(config, (), 8, group, torch.float32, torch.device('cpu'))
        return sum(place.view.numel() for place in model.weights().values() if place.dim is not None)

    total, ranks = elements(ParallelGroup()), [elements(ParallelGroup(r, tp)) for r in range(tp)]
    decoder = config.decoder
    twice = 2 * decoder.num_layers * decoder.head_dim * decoder.hidden_size * max(tp - decoder.num_kv_heads, 0)
    assert sum(ranks) == total + twice  # key and value heads that two ranks have in common
    longest_table = -(-decoder.vocab_size // tp) * decoder.hidden_size  # the last rank's is shorter
    assert all(mine <= 1.05 * (total + twice) / tp + longest_table / tp for mine in ranks)
