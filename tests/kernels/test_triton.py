"""Every Triton kernel equals its reference: on a GPU in fp32 (IEEE) and bf16, elsewhere in fp32 under the interpreter.

Fresh memory is poisoned with NaN, so that an output which a kernel forgets to write cannot pass.
"""

import pytest
import torch
from torch import Tensor

from specdec.kernels.block_attention import ref as block_ref
from specdec.kernels.filter_threshold import Filters
from specdec.kernels.filter_threshold import ref as threshold_ref
from specdec.kernels.kv_cache import cache_slots
from specdec.kernels.kv_cache import ref as cache_ref
from specdec.kernels.linear import ref as linear_ref
from specdec.kernels.logit_rules import RuleRows, RuleTables
from specdec.kernels.logit_rules import ref as rules_ref
from specdec.kernels.markov import ChainDraws, MarkovWeights
from specdec.kernels.markov import ref as markov_ref
from specdec.kernels.moe import Fp4Weight
from specdec.kernels.moe import ref as moe_ref
from specdec.kernels.noise import Noise
from specdec.kernels.norm import ref as norm_ref
from specdec.kernels.paged_attention import RowLayout
from specdec.kernels.paged_attention import ref as paged_ref
from specdec.kernels.pick import NO_PICK
from specdec.kernels.pick import ref as pick_ref
from specdec.kernels.rotary import ref as rotary_ref

pytest.importorskip('triton')

from specdec.kernels.block_attention import triton as block_triton
from specdec.kernels.filter_threshold import triton as threshold_triton
from specdec.kernels.kv_cache import triton as cache_triton
from specdec.kernels.linear import triton as linear_triton
from specdec.kernels.logit_rules import triton as rules_triton
from specdec.kernels.markov import triton as markov_triton
from specdec.kernels.moe import triton as moe_triton
from specdec.kernels.norm import triton as norm_triton
from specdec.kernels.paged_attention import triton as paged_triton
from specdec.kernels.pick import triton as pick_triton
from specdec.kernels.rotary import triton as rotary_triton

CUDA = torch.cuda.is_available()
DEVICE = torch.device('cuda' if CUDA else 'cpu')
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, empty_like = torch.empty, torch.empty_like

    def spoil(tensor: Tensor) -> Tensor:
        return tensor.fill_(float('nan')) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, 'empty', lambda *a, **k: spoil(empty(*a, **k)))
    monkeypatch.setattr(torch, 'empty_like', lambda *a, **k: spoil(empty_like(*a, **k)))
    return


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 17 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == expected.shape
    assert found.isfinite().all(), 'something was not written'
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE[dtype], f'relative error {error:.2e}'


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize(
    ('rows', 'outputs', 'inputs'), [(1, 48, 96), (5, 33, 130), (17, 64, 256), (64, 100, 200), (65, 40, 72)]
)
def test_products(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype) * inputs**-0.5
    bias, residual = random(outputs, dtype=dtype), random(rows, outputs, dtype=dtype)
    norm, gate_up = random(inputs, dtype=dtype).abs(), random(2 * outputs, inputs, dtype=dtype) * inputs**-0.5
    close(linear_triton.linear(x, weight, bias), linear_ref.linear(x, weight, bias), dtype)
    close(linear_triton.linear(x, weight), linear_ref.linear(x, weight), dtype)
    close(linear_triton.head_logits(x, weight), linear_ref.head_logits(x, weight), dtype)
    close(linear_triton.linear_add(x, weight, bias, residual), linear_ref.linear_add(x, weight, bias, residual), dtype)
    args = x, norm, 1e-6
    close(linear_triton.norm_linear(*args, weight, bias), linear_ref.norm_linear(*args, weight, bias), dtype)
    close(linear_triton.norm_swiglu(*args, gate_up), linear_ref.norm_swiglu(*args, gate_up), dtype)
    close(norm_triton.rms_norm(*args), norm_ref.rms_norm(*args), dtype)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ('outputs', 'inputs'), [(6144, 4096), (4096, 4096), (4096, 12288), (24576, 4096), (151936, 1024)]
)
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(outputs: int, inputs: int) -> None:
    x = random(64, inputs, dtype=torch.bfloat16)
    weight = random(outputs, inputs, dtype=torch.bfloat16) * inputs**-0.5
    norm, residual = random(inputs, dtype=torch.bfloat16).abs(), random(64, outputs, dtype=torch.bfloat16)

    def run(rows: int) -> list[Tensor]:
        part = x[:rows]
        return [
            linear_triton.norm_linear(part, norm, 1e-6, weight, None),
            linear_triton.linear_add(part, weight, None, residual[:rows]),
            linear_triton.norm_swiglu(part, norm, 1e-6, weight),
            linear_triton.head_logits(part, weight),
        ]

    whole = run(64)
    for rows in (1, 2, 8, 16, 17, 32, 33):
        for found, expected in zip(run(rows), whole, strict=True):
            assert torch.equal(found, expected[:rows]), f'{rows} rows'


def angles(rows: int, dim: int) -> tuple[Tensor, Tensor]:
    angle = random(rows, 1, dim // 2)
    return torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_heads(dtype: torch.dtype) -> None:
    x, weight = random(7, 6, 32, dtype=dtype), random(6, 32, dtype=dtype).abs()
    rotary = angles(7, 32)
    found = rotary_triton.head_norm_rotary(x[:, 1:5], weight[1:5], 1e-6, rotary)
    close(found, rotary_ref.head_norm_rotary(x[:, 1:5], weight[1:5], 1e-6, rotary), dtype)


Requests = list[tuple[int, int]]  # (tokens before, rows)


class Scene:
    """Requests with pages in random places, and the rows of one step."""

    def __init__(self, chunks: Requests, decodes: Requests, page: int, dtype: torch.dtype) -> None:
        requests = chunks + decodes
        self.page, self.dtype, self.decodes = page, dtype, decodes
        self.heads, self.kv_heads, self.dim = 4, 2, 32
        width = max(-(-sum(r) // page) for r in requests) + 1
        order = (torch.randperm(len(requests) * width, generator=torch.Generator().manual_seed(1)) + 1).tolist()
        table = torch.zeros(len(requests), width, dtype=torch.int32)
        for r, request in enumerate(requests):
            count = -(-sum(request) // page)
            table[r, :count] = torch.tensor([order.pop() for _ in range(count)])
        self.table = table.to(DEVICE)
        rows = [count for _, count in requests]
        offsets = torch.tensor([0, *rows]).cumsum(0).to(DEVICE)
        contexts = torch.tensor([before for before, _ in requests], device=DEVICE)
        self.layout = RowLayout(offsets, contexts, self.table, tuple(r for _, r in chunks), 4, page)
        of_row = torch.repeat_interleave(torch.arange(len(requests)), torch.tensor(rows)).to(DEVICE)
        positions = torch.cat([torch.arange(before, before + count) for before, count in requests]).to(DEVICE)
        self.slots = cache_slots(self.table, of_row, positions, page)
        shape = (len(requests) * width + 1, page, self.kv_heads, self.dim)
        self.pages = random(*shape, dtype=dtype, seed=1), random(*shape, dtype=dtype, seed=2)
        self.norms = random(self.heads + self.kv_heads, self.dim, dtype=dtype).abs() + 0.5

    def qkv(self, rows: int) -> Tensor:
        return random(rows, (self.heads + 2 * self.kv_heads) * self.dim, dtype=self.dtype, seed=rows)


SCENES: list[tuple[Requests, Requests]] = [
    ([], [(5, 1)]),
    ([], [(5, 3), (0, 1), (130, 4), (300, 2)]),
    ([(0, 7), (13, 70)], [(5, 3), (40, 4)]),
    ([(0, 70)], []),
]


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('window', [None, 9])
@pytest.mark.parametrize('page', [4, 16])
@pytest.mark.parametrize('scene', range(len(SCENES)))
def test_paged_attention(scene: int, page: int, window: int | None, dtype: torch.dtype) -> None:
    case = Scene(*SCENES[scene], page, dtype)
    rows = int(case.layout.row_offsets[-1])
    results = []
    for kernel in (paged_ref, paged_triton):
        pages = [tensor.clone() for tensor in case.pages]
        plan = kernel.plan_paged_attention(case.layout, 2, frozenset([window]), dtype)
        out = kernel.paged_attention(
            case.qkv(rows), case.norms, 1e-6, angles(rows, 32), *pages, case.slots, plan, window, 32**-0.5
        )
        results.append([out, *pages])
    for found, expected in zip(results[1], results[0], strict=True):
        close(found, expected, dtype)


@pytest.mark.parametrize('limits', [(128, 16, 512, 3), (16, 2, 32, 1024)], ids=['one program a request', 'many splits'])
def test_splits_merge_to_the_same(limits: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(('NEAR_SPLIT', 'NEAR_SPLITS', 'FAR_SPLIT', 'MAX_ITEMS'), limits, strict=True):
        monkeypatch.setattr(paged_triton, name, value)
    test_paged_attention(1, 4, None, torch.float32)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize(
    'rule', [(False, None, False), (True, None, False), (True, 9, False), (False, 3, False), (False, 2, True)], ids=str
)
def test_block_attention(rule: tuple[bool, int | None, bool], dtype: torch.dtype) -> None:
    case = Scene(*SCENES[1], 16, dtype)
    contexts = case.layout.contexts.clamp(min=1)
    rows = 6 * len(contexts)
    results = []
    for kernel in (block_ref, block_triton):
        plan = kernel.plan_block_attention(contexts, case.table, 16, 6, 2, frozenset([rule]), dtype)
        rotary = angles(rows, 32)
        results.append(
            kernel.block_attention(case.qkv(rows), case.norms, 1e-6, rotary, *case.pages, plan, rule, 32**-0.5)
        )
    close(results[1], results[0], dtype)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_page_writes(dtype: torch.dtype) -> None:
    k, v = random(6, 2, 8, dtype=dtype, seed=1), random(6, 2, 8, dtype=dtype, seed=2)
    slots = torch.tensor([4, 5, 11, 6, 7, 9], device=DEVICE)
    written = []
    for kernel in (cache_ref, cache_triton):
        pages = torch.zeros(2, 3, 4, 2, 8, dtype=dtype, device=DEVICE)
        kernel.kv_write(k, v, pages[0], pages[1], slots)
        written.append(pages)
    assert torch.equal(*written)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize(('rows', 'limit'), [(1, None), (9, 0.3), (40, None)])
def test_experts(rows: int, limit: float | None, dtype: torch.dtype) -> None:
    x = random(rows, 48, dtype=dtype)
    gate_up, down = random(6, 80, 48, dtype=dtype) * 0.15, random(6, 48, 40, dtype=dtype) * 0.15
    weights, experts = moe_triton.route_top_k(random(rows, 6), 3, True)
    found = moe_triton.expert_mlps(x, gate_up, down, weights, experts, limit)
    close(found, moe_ref.expert_mlps(x, gate_up, down, weights, experts, limit), dtype)


@pytest.mark.parametrize('kind', ['vanilla', 'gated', 'rnn'])
@pytest.mark.parametrize('mapped', [False, True])
def test_markov_chain(kind: str, mapped: bool) -> None:
    batch, steps, vocabulary, rank, size = 3, 4, 333, 12, 20
    weights = MarkovWeights(
        random(700, rank), random(vocabulary, rank), kind,
        gate=random(rank, size + rank), gate_bias=random(rank),
        joint=random(3 * rank, 2 * rank + size), joint_bias=random(3 * rank),
        d2t=torch.arange(vocabulary, device=DEVICE) if mapped else None,
    )  # fmt: skip
    base, hidden = random(batch, steps, vocabulary) * 3, random(batch, steps, size)
    args = base, hidden, random(batch, size), torch.tensor([1, 2, 3], device=DEVICE), weights, None, None
    for found, expected in zip(markov_triton.markov_chain(*args), markov_ref.markov_chain(*args), strict=True):
        assert torch.equal(found, expected)


def test_argmax_takes_the_lower_of_equals() -> None:
    logits = random(5, 9001)
    logits[0, [7, 5000]] = logits[1, [8999, 4095]] = 9.0
    found = pick_triton.argmax(logits)
    assert torch.equal(found, pick_ref.argmax(logits))
    assert found[:2].tolist() == [7, 4095]


@pytest.mark.parametrize('filtered', [False, True])
def test_noisy_argmax(filtered: bool) -> None:
    logits = random(6, 9001)
    temperature = torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0, 0.3], device=DEVICE)
    threshold = torch.tensor([-9.0, -9.0, 1.0, 0.2, -1.0, 5.0], device=DEVICE) if filtered else None
    seeds = torch.tensor([1, 2, -3, 4, 2**62 + 5, 6], device=DEVICE)
    positions = torch.tensor([3, 4, 5, 6, 70000, 8], device=DEVICE)
    args = logits, temperature, threshold, Noise(seeds, positions), None
    assert torch.equal(pick_triton.noisy_argmax(*args), pick_ref.noisy_argmax(*args))


def test_noisy_argmax_with_streams_and_columns_of_other_ids() -> None:
    logits = random(3, 5000)
    logits[2] = float('-inf')
    temperature = torch.tensor([1.0, 0.7, 1.0], device=DEVICE)
    streams = torch.tensor([0, 3 + (9 << 32), 0], device=DEVICE)
    noise = Noise(torch.tensor([1, 2, 3], device=DEVICE), torch.tensor([4, 5, 6], device=DEVICE), streams)
    for ids in (None, torch.arange(5000, device=DEVICE) * 3 + 1):
        found = pick_triton.noisy_argmax(logits, temperature, None, noise, ids)
        assert torch.equal(found, pick_ref.noisy_argmax(logits, temperature, None, noise, ids))
        assert found[2] == NO_PICK
    assert pick_triton.argmax(logits)[2] == NO_PICK


@pytest.mark.parametrize('filtered', [False, True])
@pytest.mark.parametrize('mapped', [False, True])
@pytest.mark.parametrize('kind', ['vanilla', 'rnn'])
def test_markov_chain_with_noise(kind: str, mapped: bool, filtered: bool) -> None:
    """Greedy, coupled and probabilistic requests side by side; the logits that were drawn from are kept."""
    batch, steps, vocabulary, rank, size = 3, 3, 333, 12, 20
    weights = MarkovWeights(
        random(700, rank), random(vocabulary, rank), kind, joint=random(3 * rank, 2 * rank + size),
        joint_bias=random(3 * rank), d2t=torch.arange(vocabulary, device=DEVICE) if mapped else None,
    )  # fmt: skip
    base, hidden = random(batch, steps, vocabulary), random(batch, steps, size)
    seeds, positions = torch.tensor([7, 8, 9], device=DEVICE), torch.tensor([20, 30, 40], device=DEVICE)
    noise = Noise(seeds, positions, torch.tensor([0, 0, 3 + (39 << 32)], device=DEVICE))
    filters = None
    if filtered:
        top_k, cuts = torch.tensor([0, 3, 50], device=DEVICE), torch.tensor([1.0, 0.9, 0.8], device=DEVICE)
        filters = Filters(top_k, cuts, 1 - cuts)
    results = []
    for module in (markov_triton, markov_ref):
        kept = torch.empty_like(base)
        draws = ChainDraws(torch.tensor([0.0, 1.0, 0.7], device=DEVICE), noise, filters, kept)
        anchors = torch.tensor([1, 2, 3], device=DEVICE)
        results.append((*module.markov_chain(base, hidden, None, anchors, weights, None, draws), kept))
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('forced', [False, True])
def test_logit_rules(forced: bool) -> None:
    requests, slots, drafts, vocabulary = 3, 5, 2, 4500
    tables = RuleTables(
        counts=torch.randint(0, 5, (slots, vocabulary), dtype=torch.int32, device=DEVICE),
        penalties=torch.tensor([[1, 0, 0], [1.3, 0, 0], [1, 0.5, 0.25], [0.8, -1, 0.5], [1, 0, 0]], device=DEVICE),
        bias_ids=torch.randint(0, vocabulary, (slots, 6), device=DEVICE),
        bias_values=random(slots, 6),
        num_bias=torch.tensor([0, 6, 0, 6, 0], device=DEVICE),
        masks=torch.randint(-(2**31), 2**31 - 1, (slots, drafts + 1, -(-vocabulary // 32)), dtype=torch.int32).to(
            DEVICE
        ),
    )
    tables.bias_ids[1] = torch.arange(6, device=DEVICE) * 700
    tables.bias_ids[3] = torch.arange(6, device=DEVICE) * 701
    tables.bias_values[[0, 2, 4]] = 0
    rows = RuleRows(
        requests=torch.tensor([0, 0, 0, 1, 1, 2], device=DEVICE),
        steps=torch.tensor([0, 1, 2, 0, 1, 0], device=DEVICE),
        slots=torch.tensor([3, 1, 2], device=DEVICE),
        drafts=torch.tensor([[5, 5], [701, 9], [1, 2]], device=DEVICE),
    )
    only = torch.tensor([-1, 7, -1, -1, 8, -1], device=DEVICE) if forced else None
    logits = random(6, vocabulary)
    before = logits.clone()
    for flags in ((True, True, True), (False, True, False), (True, False, False), (False, False, True)):
        found = rules_triton.apply_rules(logits, rows, tables, *flags, only)
        torch.testing.assert_close(
            found, rules_ref.apply_rules(logits, rows, tables, *flags, only), rtol=1e-6, atol=1e-6
        )
    assert torch.equal(logits, before)
    assert rows.requests.max() < requests


@pytest.mark.parametrize('vocabulary', [300, 9001])
def test_filter_threshold(vocabulary: int) -> None:
    """The fast way, the slow one, ties, everything ruled out but a few, and rows without a filter."""
    kinds = [
        (0, 1.0, 0.0), (1, 1.0, 0.0), (5, 1.0, 0.0), (50, 0.9, 0.02), (64, 0.5, 0.0), (65, 0.9, 0.0), (0, 0.9, 0.0),
        (0, 0.3, 0.2), (0, 1.0, 0.1), (200, 1.0, 0.0), (vocabulary + 5, 0.7, 0.0), (20, 1e-6, 0.0), (3, 0.9, 0.9),
    ]  # fmt: skip
    top_k, top_p, min_p = (torch.tensor(column, device=DEVICE) for column in zip(*kinds))
    heat = torch.linspace(0.3, 1.5, len(kinds), device=DEVICE)
    heat[2] = 0
    smooth = random(len(kinds), vocabulary) * 3
    tied = (smooth * 2).round() / 2
    narrow = smooth.clone()
    narrow[:, 30:] = float('-inf')
    for logits in (smooth, tied, narrow):
        found = threshold_triton.filter_threshold(logits, heat, top_k, top_p, min_p, 0)
        expected = threshold_ref.filter_threshold(logits, heat, top_k, top_p, min_p, 0)
        scaled = logits / torch.where(heat > 0, heat, 1.0)[:, None]
        kept = [(scaled >= cut[:, None]) & scaled.isfinite() for cut in (found, expected)]
        assert torch.equal(*kept)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('rows', [1, 9])
def test_experts_in_four_bits(rows: int, dtype: torch.dtype) -> None:
    """Bit by bit what their numbers give, in either implementation."""
    generator = torch.Generator().manual_seed(rows)

    def packed(*shape: int) -> Fp4Weight:
        values = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 126, (*shape[:-1], shape[-1] // 32), generator=generator, dtype=torch.uint8)
        return Fp4Weight(values.to(DEVICE), scales.to(DEVICE))

    x, gate_up, down = random(rows, 96, dtype=dtype), packed(5, 128, 96), packed(5, 96, 64)
    plain = moe_ref.numbers(gate_up, dtype), moe_ref.numbers(down, dtype)
    weights, experts = moe_triton.route_top_k(random(rows, 5), 3, True)
    for module in (moe_ref, moe_triton):
        found = module.expert_mlps(x, gate_up, down, weights, experts, 2.0)
        assert torch.equal(found, module.expert_mlps(x, *plain, weights, experts, 2.0))
    close(found, moe_ref.expert_mlps(x, *plain, weights, experts, 2.0), dtype)


def test_many_rows_in_portions() -> None:
    x, gate_up, down = random(70, 32), random(4, 32, 32) * 0.15, random(4, 32, 16) * 0.15
    weights, experts = moe_triton.route_top_k(random(70, 4), 2, True)
    found = moe_triton.in_portions(x, gate_up, down, weights, experts, None)
    close(found, moe_ref.expert_mlps(x, gate_up, down, weights, experts), torch.float32)
