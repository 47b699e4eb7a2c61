"""A trained tiny DeepSeek-V4 on a GPU: the CPU's text, graphs equal to eager, a step that never waits."""

import functools

import pytest
import torch

from specdec.engine.build import build_engine
from specdec.engine.engine import Engine
from specdec.messages import EngineRequest, PytorchEngineConfig, SamplingParams, SpeculativeConfig
from tests.engine.test_cuda import generate, same_share
from tests.helpers.deepseek_v4_training import FOLDER, language

pytestmark = pytest.mark.cuda

PROMPTS = [tuple(language().text(length, 77 + length)) for length in (9, 30, 100, 150, 260)]
SAMPLED = {'temperature': 0.8}


@functools.cache
def engine(drafts: bool, dtype: str = 'float32', device: str = 'cuda', **settings: object) -> Engine:
    config = PytorchEngineConfig(
        dtype=dtype, device_type=device, session_len=768, max_batch_size=8, num_gpu_blocks=40, **settings
    )
    return build_engine(str(FOLDER), config, SpeculativeConfig('dspark') if drafts else None)


@pytest.mark.parametrize('params', [{}, SAMPLED], ids=str)
def test_text_is_the_cpus(params: dict[str, float]) -> None:
    """fp32, with drafts or without: the same tokens but for near-ties, which end the comparison of their prompt."""
    expected, _ = generate(engine(False, device='cpu'), PROMPTS, 60, **params)
    for drafts in (False, True):
        found, accepted = generate(engine(drafts), PROMPTS, 60, **params)
        assert same_share(found, expected) > 0.9
        assert accepted > 2 or not drafts


@pytest.mark.parametrize('params', [{}, SAMPLED], ids=str)
@pytest.mark.parametrize('drafts', [False, True])
def test_graphs_equal_eager(drafts: bool, params: dict[str, float]) -> None:
    captured = engine(drafts, 'bfloat16')
    found, accepted = generate(captured, PROMPTS, **params)
    assert captured.agent.eager_decode_steps == 0
    assert captured.agent.graphs.replays > 10
    expected, eager_accepted = generate(engine(drafts, 'bfloat16', eager_mode=True), PROMPTS, **params)
    assert found == expected
    assert accepted == eager_accepted


def test_a_prefix_hit_changes_nothing() -> None:
    """The second time every prompt of more than a page begins behind copied rings."""
    running = engine(True, 'bfloat16')
    first, accepted = generate(running, PROMPTS)
    again, accepted_again = generate(running, PROMPTS)
    assert same_share(again, first) > 0.9
    assert abs(accepted - accepted_again) < 0.5


@pytest.mark.parametrize('drafts', [False, True])
def test_steady_state_never_waits_for_the_device(drafts: bool) -> None:
    running = engine(drafts, 'bfloat16')
    for i, prompt in enumerate(PROMPTS):
        running.add(EngineRequest(i, prompt, SamplingParams(400, temperature=0.5 * (i % 2))))
    for _ in range(6):
        running.step()
    torch.cuda.set_sync_debug_mode('error')
    try:
        for _ in range(12):
            running.step()
    finally:
        torch.cuda.set_sync_debug_mode('default')
    assert running.agent.eager_decode_steps == 0
    running.abort(range(len(PROMPTS)))
    while running.has_work():
        running.step()
