"""The engine on a GPU, with the demo's models: the CPU's text, graphs equal to eager, bits drafts do not change."""

import functools
from collections.abc import Sequence

import pytest
import torch

from specdec.demo.prompts import held_out_prompts
from specdec.engine.build import build_engine
from specdec.engine.engine import Engine
from specdec.engine.tokenizer import Tokenizer
from specdec.messages import EngineRequest, PytorchEngineConfig, SamplingParams, SpeculativeConfig

pytestmark = pytest.mark.cuda

METHODS = (None, 'dflash', 'dspark')


@functools.cache
def engine(method: str | None, dtype: str = 'float32', device: str = 'cuda', **settings: object) -> Engine:
    """Built once for the whole module: an idle engine remembers nothing that another test could see."""
    config = PytorchEngineConfig(
        dtype=dtype, device_type=device, session_len=1024, max_batch_size=8, num_gpu_blocks=160,
        enable_prefix_caching=False, **settings,
    )  # fmt: skip
    return build_engine('demo', config, SpeculativeConfig(method) if method else None)


@pytest.fixture(scope='module')
def prompts() -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.load(build_engine('demo', PytorchEngineConfig(device_type='cpu')).info.folder)
    return [tuple(tokenizer.encode(prompt.text)[:400]) for prompt in held_out_prompts()[:8]]


def generate(
    running: Engine, prompts: Sequence[tuple[int, ...]], tokens: int = 96, **params: object
) -> tuple[list[list[int]], float]:
    """Token ids of each prompt, all admitted together, and the mean accepted length."""
    texts: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    steps = accepted = 0
    for i, prompt in enumerate(prompts):
        settings = {'max_new_tokens': tokens, 'seed': i, **params}
        running.add(EngineRequest(i, prompt, SamplingParams(**settings)))
    while running.has_work():
        for output in running.step():
            texts[output.request_id] += output.token_ids
            steps += output.decode
            accepted += (len(output.token_ids) - 1) if output.decode else 0
    return list(texts.values()), 1 + accepted / max(steps, 1)


def same_share(found: list[list[int]], expected: list[list[int]]) -> float:
    """Share of tokens before the first difference of each text."""
    equal = total = 0
    for a, b in zip(found, expected, strict=True):
        total += len(b)
        equal += next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))
    return equal / total


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize(
    'params', [{}, {'temperature': 0.8}, {'temperature': 1.0, 'top_k': 40, 'top_p': 0.9, 'min_p': 0.02}], ids=str
)
def test_text_is_the_cpus(method: str | None, params: dict[str, float], prompts: list[tuple[int, ...]]) -> None:
    """fp32: the same tokens but for near-ties, which end the comparison of their prompt."""
    expected, _ = generate(engine(None, device='cpu'), prompts, 48, **params)
    found, _ = generate(engine(method), prompts, 48, **params)
    assert same_share(found, expected) > 0.9


@pytest.mark.parametrize('method', ['dflash', 'dspark'])
@pytest.mark.parametrize('params', [{}, {'temperature': 0.8}], ids=str)
@pytest.mark.parametrize('together', [1, 8])
def test_bf16_text_has_the_same_bits_with_and_without_drafts(
    method: str, params: dict[str, float], together: int, prompts: list[tuple[int, ...]]
) -> None:
    """As long as a step keeps within 64 rows: 8 requests of 8 rows."""
    expected, _ = generate(engine(None, 'bfloat16'), prompts[:together], **params)
    found, accepted = generate(engine(method, 'bfloat16'), prompts[:together], **params)
    assert found == expected
    assert accepted > 1.2


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('params', [{}, {'temperature': 0.8, 'top_p': 0.9}], ids=str)
def test_graphs_equal_eager(method: str | None, params: dict[str, float], prompts: list[tuple[int, ...]]) -> None:
    captured = engine(method, 'bfloat16')
    found, accepted = generate(captured, prompts, **params)
    assert captured.agent.eager_decode_steps == 0
    assert captured.agent.graphs.replays > 10
    expected, eager_accepted = generate(engine(method, 'bfloat16', eager_mode=True), prompts, **params)
    assert found == expected
    assert accepted == eager_accepted


def test_padding_touches_nobody(prompts: list[tuple[int, ...]]) -> None:
    """Three requests in a bucket of four: pages that no running request holds keep every bit."""
    running = engine('dspark', 'bfloat16')
    for i, prompt in enumerate(prompts[:3]):
        running.add(EngineRequest(i, prompt, SamplingParams(64)))
    for _ in range(4):
        running.step()
    held = {page for s in running.scheduler.running for page in s.pages} | {0}
    others = torch.tensor([p for p in range(running.memory.num_pages) if p not in held], device='cuda')
    caches = running.agent.model.caches
    layers = [*caches.target.k, *caches.target.v, *caches.draft.k, *caches.draft.v]
    for layer in layers:
        layer[others] = 7.0
    while running.has_work():
        running.step()
        now = {page for s in running.scheduler.running for page in s.pages}
        others = torch.tensor([p for p in others.tolist() if p not in now], device='cuda')
        assert all((layer[others] == 7.0).all() for layer in layers)


@pytest.mark.parametrize('method', METHODS)
def test_steady_state_never_waits_for_the_device(method: str | None, prompts: list[tuple[int, ...]]) -> None:
    running = engine(method, 'bfloat16')
    for i, prompt in enumerate(prompts):
        running.add(EngineRequest(i, prompt, SamplingParams(200, temperature=0.5 * (i % 2))))
    for _ in range(6):
        running.step()
    torch.cuda.set_sync_debug_mode('error')
    try:
        for _ in range(12):
            running.step()
    finally:
        torch.cuda.set_sync_debug_mode('default')
    assert running.agent.eager_decode_steps == 0
    running.abort(range(len(prompts)))
    while running.has_work():
        running.step()


def test_late_news_leaks_nothing(prompts: list[tuple[int, ...]]) -> None:
    """Aborts, arrivals and stops under overlap: the texts of the others are their solo texts."""
    solo = [generate(engine('dspark', 'bfloat16'), [prompt], 40, seed=1)[0][0] for prompt in prompts[:4]]
    running = engine('dspark', 'bfloat16')
    texts: dict[int, list[int]] = {i: [] for i in range(8)}
    for step in range(400):
        if step % 3 == 0 and step // 3 < 8:
            i = step // 3
            running.add(EngineRequest(i, prompts[i % 4], SamplingParams(40, seed=1)))
        if step == 14:
            running.abort([2, 3])
        for output in running.step():
            texts[output.request_id] += output.token_ids
        if step > 30 and not running.has_work():
            break
    for i in (0, 1, 4, 5, 6, 7):
        assert len(texts[i]) == 40
        assert same_share([texts[i]], [solo[i % 4]]) > 0.6  # prompts run beside decoding rows: margin-gated
    running.scheduler.check()
