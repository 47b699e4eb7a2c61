"""Qwen3 targets against transformers: logits and taps, whatever way the rows arrive."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.models.checkpoint import tensor_shapes
from specdec.models.target import TargetModel
from tests.helpers.models import PagedRequests, Piece, load_target, random_reference, reference_outputs

YARN = {'rope_type': 'yarn', 'rope_theta': 10000.0, 'factor': 4.0, 'original_max_position_embeddings': 16}
VARIANTS: dict[str, dict[str, Any]] = {
    'untied': {},
    'tied': {'tie_word_embeddings': True},
    'bias': {'attention_bias': True},
    'wide_heads': {'head_dim': 20, 'num_attention_heads': 6, 'num_key_value_heads': 3},
    'one_kv_head': {'num_key_value_heads': 1},
    'sliding_tail': {'use_sliding_window': True, 'sliding_window': 6, 'max_window_layers': 2},
    'sliding_mixed': {
        'use_sliding_window': True,
        'sliding_window': 5,
        'layer_types': ['sliding_attention', 'full_attention', 'sliding_attention', 'full_attention'],
    },
    'yarn': {'rope_parameters': YARN},
    'yarn_settings': {'rope_parameters': YARN | {'attention_factor': 0.8, 'beta_fast': 16.0, 'truncate': False}},
    'linear_rope': {'rope_parameters': {'rope_type': 'linear', 'rope_theta': 5000.0, 'factor': 3.0}},
    'moe': {'moe': True},
    'moe_normed': {'moe': True, 'norm_topk_prob': True},
    'moe_sparse_step': {'moe': True, 'norm_topk_prob': True, 'decoder_sparse_step': 2},
    'moe_mlp_only': {'moe': True, 'mlp_only_layers': [0, 2], 'num_experts_per_tok': 3},
    'moe_sliding': {'moe': True, 'use_sliding_window': True, 'sliding_window': 6},
}
PROMPTS = ((3,), tuple((7 * i + 5) % 97 for i in range(33)), tuple((11 * i + 2) % 89 for i in range(20)))
TAPS = (-1, 0, 2, 3)  # 3 is the last layer: raw, before the final norm


class Case:
    """A checkpoint folder and what transformers says of every prompt."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.folder = folder
        self.references = [reference_outputs(model, ids) for ids in PROMPTS]


@pytest.fixture(scope='module', params=VARIANTS, ids=list(VARIANTS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model = random_reference(seed=1, **VARIANTS[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return Case(folder, model)


# ---------------------------------------------------------------------------------- ways in which rows may arrive
def whole() -> Iterator[list[Piece]]:
    yield [Piece(r, ids, chunk=True) for r, ids in enumerate(PROMPTS)]


def one_by_one() -> Iterator[list[Piece]]:
    """A short prompt, then decoding, every request in every step until it ends."""
    yield [Piece(r, ids[:3], chunk=True) for r, ids in enumerate(PROMPTS)]
    for i in range(3, max(map(len, PROMPTS))):
        yield [Piece(r, (ids[i],), chunk=False) for r, ids in enumerate(PROMPTS) if i < len(ids)]


def chunks_and_ragged_decodes() -> Iterator[list[Piece]]:
    """Chunks of 7 of the long prompt beside decode steps of 1 to 4 rows of the others."""
    done, step = [0, 0, 0], 0
    while any(done[r] < len(ids) for r, ids in enumerate(PROMPTS)):
        pieces = []
        for r, count, chunk in ((1, 7, step < 3), (0, 1, False), (2, 1 + step % 4, False)):
            ids = PROMPTS[r][done[r] : done[r] + count]
            if ids:
                pieces.append(Piece(r, ids, chunk))
                done[r] += len(ids)
        step += 1
        yield pieces


def drive(target: TargetModel, page_size: int, steps: Iterator[Sequence[Piece]]) -> tuple[list[Tensor], list[Tensor]]:
    """Logits and taps of each prompt's rows. Decode pieces are followed by two wrong rows that are never committed."""
    requests = PagedRequests(page_size, tuple(len(ids) + 2 for ids in PROMPTS))
    cache = requests.cache(target)
    logits: list[list[Tensor]] = [[] for _ in PROMPTS]
    taps: list[list[Tensor]] = [[] for _ in PROMPTS]
    for pieces in steps:
        padded = [Piece(p.request, p.ids if p.chunk else (*p.ids, 99, 98), p.chunk) for p in pieces]
        rows = requests.rows(padded)
        output = target.forward(rows, cache)
        assert output.taps is not None
        offsets = rows.layout.row_offsets.tolist()
        for piece, start in zip(pieces, offsets):
            kept = slice(start, start + len(piece.ids))
            logits[piece.request].append(target.head(output.hidden[kept]))
            taps[piece.request].append(output.taps[kept])
            requests.commit(piece.request, len(piece.ids))
    return [torch.cat(x) for x in logits], [torch.cat(x) for x in taps]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize('page_size', [4, 64])
@pytest.mark.parametrize('arrive', [whole, one_by_one, chunks_and_ragged_decodes])
def test_logits_and_taps_equal_transformers(case: Case, arrive: Any, page_size: int) -> None:
    target = load_target(case.folder, TAPS)
    with torch.inference_mode():
        logits, taps = drive(target, page_size, arrive())
    assert worst(logits, [r.logits for r in case.references]) < 1e-4
    assert worst(taps, [torch.cat([r.streams[k] for k in TAPS], -1) for r in case.references]) < 1e-4


def test_taps_do_not_depend_on_which_others_are_taken(case: Case) -> None:
    with torch.inference_mode():
        _, taps = drive(load_target(case.folder, (1,)), 4, whole())
    assert worst(taps, [r.streams[1] for r in case.references]) < 1e-4


@pytest.mark.parametrize('variant', ['untied', 'tied', 'sliding_tail', 'yarn', 'moe_normed'])
def test_bfloat16_follows_transformers(variant: str, tmp_path: Path) -> None:
    model = random_reference(seed=2, **VARIANTS[variant]).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    expected = torch.cat([reference_outputs(model, ids).logits for ids in PROMPTS]).float()
    with torch.inference_mode():
        logits, taps = drive(load_target(tmp_path, TAPS, torch.bfloat16), 4, chunks_and_ragged_decodes())
    found = torch.cat(logits)
    assert found.dtype == torch.float32
    assert taps[0].dtype == torch.bfloat16
    cosines = F.cosine_similarity(found, expected, dim=-1)
    assert cosines.median() > 0.999
    # an expert chosen otherwise by rounding may change a row; it must stay the exception
    assert (cosines > 0.99).float().mean() > 0.9
    top = expected.topk(2).values
    clear = (top[:, 0] - top[:, 1]) > 0.25
    assert (found.argmax(-1) == expected.argmax(-1))[clear].float().mean() > 0.95


@pytest.mark.parametrize('moe', [False, True])
def test_shards_load_as_one_file_does(moe: bool, tmp_path: Path) -> None:
    model = random_reference(seed=3, moe=moe)
    model.save_pretrained(tmp_path / 'one')
    model.save_pretrained(tmp_path / 'many', max_shard_size='20KB')
    assert (tmp_path / 'many' / 'model.safetensors.index.json').exists()
    assert len(list((tmp_path / 'many').glob('*.safetensors'))) > 2
    assert tensor_shapes(tmp_path / 'one') == tensor_shapes(tmp_path / 'many')
    with torch.inference_mode():
        one, many = (drive(load_target(tmp_path / name, TAPS), 4, whole())[0] for name in ('one', 'many'))
    assert all(torch.equal(a, b) for a, b in zip(one, many))
