"""Hybrid targets against transformers: logits and taps, however the rows arrive and whatever was rejected before."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.layers.cache_specs import CacheRoom
from specdec.layers.recurrent import HybridCache
from specdec.models.checkpoint import read_target, tensor_shapes
from specdec.models.hybrid.target import implied_shapes
from specdec.models.target import TargetModel
from specdec.models.tensor_table import account, ignored_target
from tests.helpers.hybrid import KINDS, as_vision_model, random_hybrid, rewrite, stack_experts
from tests.helpers.models import CPU, PagedRequests, Piece, load_target, reference_outputs

PROMPTS = tuple(tuple((a * i + b) % 97 for i in range(n)) for a, b, n in ((5, 3, 1), (7, 5, 150), (11, 2, 70)))
TAPS = (-1, 0, 1, 3)
MAX_DRAFTS = 5


class Case:
    def __init__(self, folder: Path, model: Any) -> None:
        self.folder = folder
        self.references = [reference_outputs(model, ids) for ids in PROMPTS]


@pytest.fixture(scope='module', params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model = random_hybrid(request.param, seed=1)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return Case(folder, model)


# ---------------------------------------------------------------------------------- ways in which rows may arrive
def chunks(size: int) -> Iterator[list[Piece]]:
    """All prompts side by side, `size` tokens of each at a time."""
    for start in range(0, max(map(len, PROMPTS)), size):
        yield [Piece(r, ids[start : start + size], True) for r, ids in enumerate(PROMPTS) if start < len(ids)]


def one_by_one() -> Iterator[list[Piece]]:
    yield [Piece(r, ids[:1], True) for r, ids in enumerate(PROMPTS)]
    for i in range(1, max(map(len, PROMPTS))):
        yield [Piece(r, (ids[i],), False) for r, ids in enumerate(PROMPTS) if i < len(ids)]


def ragged() -> Iterator[list[Piece]]:
    """Chunks of 7 of one prompt, beside verify steps of another that accept 1 to 6 rows; then both verify; then one
    sits out, its rows pending all the while.
    """
    done, step = [0, 0, 0], 0
    while any(done[r] < len(ids) for r, ids in enumerate(PROMPTS)):
        pieces = []
        for r, count, chunk in ((1, 7, True), (0, 1, False), (2, 1 + step % 6, False)):
            if r == 1 and step >= 3:
                count, chunk = 1 + (step * 5) % 6, False
            if r == 2 and step % 4 == 3:
                continue
            ids = PROMPTS[r][done[r] : done[r] + count]
            if ids:
                pieces.append(Piece(r, ids, chunk))
                done[r] += len(ids)
        step += 1
        yield pieces


def drive(target: TargetModel, steps: Iterator[Sequence[Piece]]) -> tuple[list[Tensor], list[Tensor]]:
    """Logits and taps of each prompt's rows. Verify steps have wrong rows behind those that are committed; before
    anything runs, caches are full of what can only do harm.
    """
    requests = PagedRequests(4, tuple(len(ids) + MAX_DRAFTS + 1 for ids in PROMPTS))
    cache = target.cache_spec(MAX_DRAFTS).allocate(CacheRoom(requests.num_pages, 4, len(PROMPTS) + 1), CPU)
    spoil(cache)
    logits: list[list[Tensor]] = [[] for _ in PROMPTS]
    taps: list[list[Tensor]] = [[] for _ in PROMPTS]
    for pieces in steps:
        padded = [
            Piece(p.request, p.ids if p.chunk else (*p.ids, 99, 98, 97, 96, 95)[: MAX_DRAFTS + 1], p.chunk)
            for p in pieces
        ]
        rows = requests.rows(padded)
        output = target.forward(rows, cache)
        assert output.taps is not None
        for piece, start in zip(pieces, rows.layout.row_offsets.tolist()):
            kept = slice(start, start + len(piece.ids))
            logits[piece.request].append(target.head(output.hidden[kept]))
            taps[piece.request].append(output.taps[kept])
            requests.commit(piece.request, len(piece.ids))
    return [torch.cat(x) for x in logits], [torch.cat(x) for x in taps]


def spoil(cache: HybridCache) -> None:
    for pages in (*cache.pages.k, *cache.pages.v):
        pages.fill_(7.0)
    for layer in cache.states.layers:
        for tensor in (layer.delta.state, layer.delta.inputs, layer.delta.gates, layer.windows):
            tensor.fill_(float('nan'))
    cache.states.lengths.fill_(3)
    cache.states.parity.fill_(1)


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


ARRIVALS: dict[str, Callable[[], Iterator[list[Piece]]]] = {
    'whole': lambda: chunks(1000),
    'chunks_of_1': lambda: chunks(1),
    'chunks_of_7': lambda: chunks(7),
    'chunks_of_64': lambda: chunks(64),
    'one_by_one': one_by_one,
    'ragged': ragged,
}


@pytest.mark.parametrize('arrive', ARRIVALS.values(), ids=ARRIVALS)
def test_logits_and_taps_equal_transformers(case: Case, arrive: Callable[[], Iterator[list[Piece]]]) -> None:
    target = load_target(case.folder, TAPS)
    with torch.inference_mode():
        logits, taps = drive(target, arrive())
    assert worst(logits, [r.logits for r in case.references]) < 1e-4
    assert worst(taps, [torch.cat([r.streams[k] for k in TAPS], -1) for r in case.references]) < 1e-4


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    'tied': ('dense', {'tie_word_embeddings': True}),
    'biased': ('dense', {'attention_bias': True}),
    'one_key_head_each': ('dense', {'linear_num_key_heads': 4}),
    'quarter_rotation': ('dense', {'rope_parameters': {'rope_theta': 1e4, 'partial_rotary_factor': 0.25}}),
    'yarn': (
        'dense',
        {
            'rope_parameters': {
                'rope_type': 'yarn',
                'rope_theta': 1e4,
                'partial_rotary_factor': 0.5,
                'factor': 4.0,
                'original_max_position_embeddings': 32,
            }
        },
    ),
    'linear_rope': ('dense', {'rope_parameters': {'rope_type': 'linear', 'rope_theta': 5e3, 'factor': 3.0}}),
    'wide_convolution': ('dense', {'linear_conv_kernel_dim': 6}),
    'dense_layers': ('next', {'mlp_only_layers': [1], 'norm_topk_prob': False}),
}


@pytest.mark.parametrize('variant', VARIANTS)
def test_variants_equal_transformers(variant: str, tmp_path: Path) -> None:
    kind, changes = VARIANTS[variant]
    if 'rope_parameters' in changes:
        sections = {'mrope_section': [1, 1, 0], 'mrope_interleaved': True, 'rope_type': 'default'}
        changes = {**changes, 'rope_parameters': {**sections, **changes['rope_parameters']}}
    model = random_hybrid(kind, seed=2, **changes)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        logits, _ = drive(load_target(tmp_path, TAPS), ragged())
    assert worst(logits, [reference_outputs(model, ids).logits for ids in PROMPTS]) < 1e-4


@pytest.mark.parametrize('kind', ['dense', 'moe'])
def test_a_vision_models_text_part_is_the_same_model(kind: str, tmp_path: Path) -> None:
    model = random_hybrid(kind, seed=3)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected, _ = drive(load_target(tmp_path, TAPS), ragged())
        rewrite(tmp_path, as_vision_model)
        rewrite(tmp_path, stack_experts)
        config = read_target(tmp_path)
        found, _ = drive(load_target(tmp_path, TAPS), ragged())
    assert config.architecture.endswith('ForConditionalGeneration')
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    tensors = account(tensor_shapes(tmp_path), implied_shapes(config), ignored_target(config))
    tensors.check('')
    assert {name.split('.')[0] for name in tensors.ignored} == {'model', 'mtp'}
    assert sum('visual' in name for name in tensors.ignored) == 1


REFUSALS = {
    'attn_output_gate': (False, 'gated'),
    'linear_num_value_heads': (3, 'multiple'),
    'layer_types': (['linear_attention'] * 4, 'both kinds'),
    'quantization_config': ({'quant_method': 'fp8'}, 'unquantised'),
    'partial_rotary_factor': (0.2, 'contradicts'),
}


@pytest.mark.parametrize('key', REFUSALS)
def test_what_would_change_a_formula_is_refused_by_name(key: str, tmp_path: Path) -> None:
    random_hybrid().save_pretrained(tmp_path)
    value, reason = REFUSALS[key]
    path = tmp_path / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_target(tmp_path)
    assert key in str(caught.value)


@pytest.mark.parametrize('kind', ['dense', 'next'])
def test_bfloat16_is_as_close_to_fp32_as_transformers_is(kind: str, tmp_path: Path) -> None:
    model = random_hybrid(kind, seed=2).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    theirs = torch.cat([reference_outputs(model, ids).logits for ids in PROMPTS]).float()
    exact = torch.cat([reference_outputs(model.float(), ids).logits for ids in PROMPTS])
    with torch.inference_mode():
        logits, taps = drive(load_target(tmp_path, TAPS, torch.bfloat16), ragged())
    found = torch.cat(logits)
    assert found.dtype == torch.float32
    assert taps[0].dtype == torch.bfloat16
    mine, reference = (torch.nn.functional.cosine_similarity(x, exact, dim=-1) for x in (found, theirs))
    assert mine.mean() > reference.mean() - 1e-3
    assert mine.median() > 0.998
