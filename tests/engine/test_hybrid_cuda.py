"""The trained hybrid on a GPU: the CPU's text, graphs equal to eager, bits that drafts do not change, no waiting."""

import functools

import pytest
import torch

from specdec.engine.build import build_engine
from specdec.engine.engine import Engine
from specdec.messages import EngineRequest, PytorchEngineConfig, SamplingParams, SpeculativeConfig
from tests.engine.test_cuda import generate, same_share
from tests.helpers.deepseek_v4_training import language
from tests.helpers.hybrid_training import FOLDER

pytestmark = pytest.mark.cuda

METHODS = (None, 'dflash', 'dspark')
PROMPTS = [tuple(language().text(length, 77 + length)) for length in (9, 20, 30, 40, 60, 100, 130, 150)]


@functools.cache
def engine(method: str | None, dtype: str = 'float32', device: str = 'cuda', **settings: object) -> Engine:
    config = PytorchEngineConfig(
        dtype=dtype, device_type=device, session_len=512, max_batch_size=8, num_gpu_blocks=80,
        enable_prefix_caching=False, **settings,
    )  # fmt: skip
    drafts = SpeculativeConfig(method, str(FOLDER / method)) if method else None
    return build_engine(str(FOLDER / 'target'), config, drafts)


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('params', [{}, {'temperature': 0.8}], ids=str)
def test_text_is_the_cpus(method: str | None, params: dict[str, float]) -> None:
    """fp32: the same tokens but for near-ties, which end the comparison of their prompt."""
    expected, _ = generate(engine(None, device='cpu'), PROMPTS, 48, **params)
    found, _ = generate(engine(method), PROMPTS, 48, **params)
    assert same_share(found, expected) > 0.9


@pytest.mark.parametrize('method', ['dflash', 'dspark'])
@pytest.mark.parametrize('together', [1, 8])
def test_bf16_text_has_the_same_bits_with_and_without_drafts(method: str, together: int) -> None:
    """A row is folded with the arithmetic that it was run with, so the state has the same bits, too."""
    expected, _ = generate(engine(None, 'bfloat16'), PROMPTS[:together])
    found, accepted = generate(engine(method, 'bfloat16'), PROMPTS[:together])
    assert found == expected
    assert accepted > 1.2


@pytest.mark.parametrize('method', METHODS)
def test_graphs_equal_eager(method: str | None) -> None:
    captured = engine(method, 'bfloat16')
    found, accepted = generate(captured, PROMPTS)
    assert captured.agent.eager_decode_steps == 0
    assert captured.agent.graphs.replays > 10
    expected, eager_accepted = generate(engine(method, 'bfloat16', eager_mode=True), PROMPTS)
    assert found == expected
    assert accepted == eager_accepted


@pytest.mark.parametrize('method', METHODS)
def test_steady_state_never_waits_for_the_device(method: str | None) -> None:
    running = engine(method, 'bfloat16')
    for i, prompt in enumerate(PROMPTS):
        running.add(EngineRequest(i, prompt, SamplingParams(200)))
    for _ in range(6):
        running.step()
    torch.cuda.set_sync_debug_mode('error')
    try:
        for _ in range(12):
            running.step()
    finally:
        torch.cuda.set_sync_debug_mode('default')
    running.abort(range(len(PROMPTS)))
    while running.has_work():
        running.step()
