"""What only a GPU does to a step, minus the GPU: padding, buckets, overlap and Triton's kernels change no token."""

import pytest

from tests.helpers.emulated_gpu import as_on_a_gpu, interpreted_kernels
from tests.helpers.engines import Settings, World, generate, make_engine, prompt_ids, request
from tests.helpers.exactness import Ledger

LENGTHS = (9, 1, 30)  # three requests, so that a bucket of four is padded
SAMPLED = {'temperature': 0.8, 'seed': 5}
FILTERED = {'temperature': 1.0, 'top_k': 20, 'top_p': 0.9, 'min_p': 0.01, 'seed': 6}


@pytest.mark.parametrize('params', [{}, SAMPLED, FILTERED], ids=['greedy', 'sampled', 'filtered'])
@pytest.mark.parametrize('draft', [None, 'dflash_fill_in', 'dspark_vanilla', 'dspark_fill_in_d2t'])
def test_padded_overlapped_steps(world: World, ledger: Ledger, draft: str | None, params: dict[str, float]) -> None:
    models = world.models(draft)
    engine = as_on_a_gpu(make_engine(models, Settings(chunk=20)))
    prompts = [prompt_ids(n, 3) for n in LENGTHS]
    found = generate(engine, [request(p, 24, **params) for p in prompts], arrivals=[0, 2, 5])
    for prompt, outcome in zip(prompts, found):
        ledger.same(models, ledger.plain(models, prompt, 24, **params), outcome)
    assert engine.agent.graphs.replays > 10
    assert engine.agent.eager_decode_steps == 0
    assert not engine.agent.model.state.ints[0].any(), 'slot 0 belongs to nobody'


@pytest.mark.slow
@pytest.mark.parametrize('draft', [None, 'dflash_sliding', 'dspark_vanilla'])
def test_triton_kernels_in_the_whole_step(world: World, ledger: Ledger, draft: str | None) -> None:
    pytest.importorskip('triton')
    models = world.models(draft)
    prompts = [prompt_ids(n, 4) for n in (9, 2, 17)]
    plain = [ledger.plain(models, p, 4) for p in prompts]
    with interpreted_kernels():
        found = generate(as_on_a_gpu(make_engine(models, Settings())), [request(p, 4) for p in prompts])
    for expected, outcome in zip(plain, found):
        ledger.same(models, expected, outcome)
