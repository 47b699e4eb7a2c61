"""Names of every layout, quantised weights, and what config.json may say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.kernels.moe import Fp4Weight
from specdec.layers.rotary import RopeConfig
from specdec.models.checkpoint import read_config, tensor_shapes, tensors
from specdec.models.deepseek_v4.config import DeepseekV4Config, read_deepseek_v4
from specdec.models.deepseek_v4.target import implied_shapes
from specdec.models.deepseek_v4.tensors import dequantise_fp4, dequantise_fp8, plain_shapes, plain_tensors, scale_values
from tests.helpers import deepseek_v4 as v4
from tests.models.deepseek_v4.conftest import Case


def plain(folder: Path) -> dict[str, Tensor]:
    return dict(plain_tensors(tensors(folder), tensor_shapes(folder)))


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert not [name for name, value in wanted.items() if not torch.equal(found[name], value)]


# ------------------------------------------------------------------------------------------------------- layouts
def test_release_layout(case: Case):
    same(plain(case.folder), v4.target_tensors(case.model) | v4.draft_tensors(case.heads))


def test_layout_of_transformers_modules(case: Case, tmp_path: Path):
    settings = case.model.config.to_dict() | {'architectures': ['DeepseekV4ForCausalLM'], 'dtype': 'float32'}
    folder = v4.write(tmp_path / 'modules', settings, v4.stacked_tensors(case.model))
    same(plain(folder), v4.target_tensors(case.model))
    check_logits(case, folder)


def test_layout_of_save_pretrained(case: Case, tmp_path: Path):
    case.model.save_pretrained(tmp_path / 'saved')
    same(plain(tmp_path / 'saved'), v4.target_tensors(case.model))
    check_logits(case, tmp_path / 'saved')


def test_a_misspelt_table_of_experts_is_known(case: Case, tmp_path: Path):
    renamed = {n.replace('tid2eid', 'tie2eid'): t for n, t in v4.target_tensors(case.model).items()}
    renamed = {n: t.int() if 'tie2eid' in n else t for n, t in renamed.items()}
    check_logits(case, v4.write(tmp_path / 'misspelt', v4.config(), renamed))


def check_logits(case: Case, folder: Path) -> None:
    """The loaded model gives the logits of the release layout, bit by bit."""
    ids = case.ids[0, :60]
    ((found, _),) = v4.Steps(v4.load_target(folder), 0, 1, 1)(chunks=[(0, 0, ids)])
    ((wanted, _),) = v4.Steps(v4.load_target(case.folder), 0, 1, 1)(chunks=[(0, 0, ids)])
    assert torch.equal(found, wanted)


# --------------------------------------------------------------------------------------------------- quantisation
def test_block_scales_of_every_byte():
    stored = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    for scale in (stored, stored.view(torch.float8_e8m0fnu)):
        values = scale_values(scale).double().tolist()
        assert values[:255] == [2.0 ** (byte - 127) for byte in range(255)]
        assert values[255] != values[255]


def test_fp8_is_the_formula():
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(200, 300, generator=generator).to(torch.float8_e4m3fn)
    for scale in (
        torch.randint(120, 134, (2, 3), generator=generator, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        torch.rand(2, 3, generator=generator),
    ):
        found, factors = dequantise_fp8(weight, scale), scale.float()
        for o, i in ((0, 0), (127, 127), (128, 128), (199, 299), (5, 256), (130, 127)):
            assert found[o, i] == weight[o, i].float() * factors[o // 128, i // 128]
        whole = torch.stack([torch.stack([factors[o // 128, i // 128] for i in range(300)]) for o in range(200)])
        assert torch.equal(found, weight.float() * whole)


def test_fp4_is_the_formula():
    generator = torch.Generator().manual_seed(2)
    weight = (
        torch.arange(256, dtype=torch.int32).to(torch.uint8).view(4, 64)[:, torch.randperm(64, generator=generator)]
    )
    scale = torch.randint(120, 134, (4, 4), generator=generator, dtype=torch.uint8)
    found = dequantise_fp4(weight.view(torch.int8), scale.view(torch.float8_e8m0fnu))
    values = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    for o in range(4):
        for i in range(128):
            byte = int(weight[o, i // 2])
            nibble = byte >> 4 if i % 2 else byte & 15
            wanted = values[nibble & 7] * (-1 if nibble & 8 else 1) * 2.0 ** (int(scale[o, i // 32]) - 127)
            assert found[o, i].item() == wanted


@pytest.fixture(scope='module')
def quantised(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    stored = v4.quantise(v4.target_tensors(case.model) | v4.draft_tensors(case.heads))
    settings = v4.bundled_config(
        expert_dtype='fp4',
        quantization_config={
            'quant_method': 'fp8',
            'fmt': 'e4m3',
            'scale_fmt': 'ue8m0',
            'weight_block_size': [128, 128],
            'activation_scheme': 'dynamic',
        },
    )
    return v4.write(tmp_path_factory.mktemp('v4') / 'quantised', settings, stored)


def test_a_quantised_checkpoint_is_the_checkpoint_of_its_numbers(case: Case, quantised: Path, tmp_path: Path):
    """Target and draft: what is loaded from FP8 and FP4 equals what is loaded from the numbers that these stand for."""
    stored = dict(tensors(quantised))
    assert {t.dtype for t in stored.values()} >= {torch.float8_e4m3fn, torch.int8, torch.float8_e8m0fnu, torch.bfloat16}
    unpacked = {}
    for name, value in stored.items():
        scale = stored.get(f'{name.removesuffix(".weight")}.scale')
        if name.endswith('.scale'):
            continue
        if scale is not None:
            value = (dequantise_fp8 if value.dtype == torch.float8_e4m3fn else dequantise_fp4)(value, scale)
        unpacked[name] = value
    folder = v4.write(tmp_path / 'unpacked', v4.bundled_config(), unpacked)
    same(plain(quantised), unpacked)
    for a, b in ((v4.load_target(quantised), v4.load_target(folder)),):
        mine = a.weights() | v4.load_draft(quantised, a).weights()
        theirs = b.weights() | v4.load_draft(folder, b).weights()
        same({n: d.view for n, d in mine.items()}, {n: d.view for n, d in theirs.items()})
    ids = case.ids[0, :60]
    ((found, _),) = v4.Steps(v4.load_target(quantised), 0, 1, 1)(chunks=[(0, 0, ids)])
    assert (found - case.logits[0, :60]).abs().mean() < 1  # coarse numbers, still this model


def test_experts_that_stay_packed_compute_the_same(case: Case, quantised: Path, monkeypatch: pytest.MonkeyPatch):
    """As on a GPU: bytes and scales are kept, and the logits are those of the numbers, bit by bit."""
    target = v4.load_target(quantised)
    monkeypatch.setattr('specdec.models.deepseek_v4.moe.keeps_packed', lambda _: True)
    packed = v4.load_target(quantised)
    experts = packed.blocks[2].experts
    assert isinstance(experts.gate_up, Fp4Weight)
    stored = dict(tensors(quantised))
    assert torch.equal(experts.gate_up.values[5, :32], stored['layers.2.ffn.experts.5.w1.weight'].view(torch.uint8))
    assert torch.equal(experts.down.scales[5], stored['layers.2.ffn.experts.5.w2.scale'].view(torch.uint8))
    ids = case.ids[0, :60]
    ((found, _),) = v4.Steps(packed, 0, 1, 1)(chunks=[(0, 0, ids)])
    ((wanted, _),) = v4.Steps(target, 0, 1, 1)(chunks=[(0, 0, ids)])
    assert torch.equal(found, wanted)
    heads = v4.load_draft(quantised, packed)
    assert isinstance(heads.stages[0].experts.down, Fp4Weight)


def test_quantised_headers_tell_plain_shapes(case: Case, quantised: Path):
    wanted = {name: tuple(t.shape) for name, t in plain(case.folder).items()}
    assert {name: info.shape for name, info in plain_shapes(tensor_shapes(quantised)).items()} == wanted


def test_stacked_fp8_experts(tmp_path: Path):
    """Experts stacked with their scales, as transformers keeps them."""
    weights, scales = zip(*(v4.to_fp8(torch.randn(64, 64)) for _ in range(3)))
    stored = {
        'model.layers.0.mlp.experts.gate_up_proj': torch.stack(weights),
        'model.layers.0.mlp.experts.gate_up_proj_scale_inv': torch.stack(scales).float(),
    }
    found = plain(v4.write(tmp_path / 'stacked', v4.config(), stored))
    for e in range(3):
        w1, w3 = dequantise_fp8(weights[e], scales[e]).chunk(2)
        assert torch.equal(found[f'layers.0.ffn.experts.{e}.w1.weight'], w1)
        assert torch.equal(found[f'layers.0.ffn.experts.{e}.w3.weight'], w3)


def test_a_weight_without_its_scale_is_an_error(tmp_path: Path):
    folder = v4.write(tmp_path / 'torn', v4.config(), {'layers.0.attn.wkv.scale': torch.ones(1, 1)})
    with pytest.raises(CheckpointError, match='only one of the two'):
        plain(folder)


# --------------------------------------------------------------------------------------------------------- config
def read(folder: Path, settings: dict[str, Any], names: tuple[str, ...] = ('embed.weight',)) -> DeepseekV4Config:
    v4.write(folder, settings, {name: torch.zeros(1) for name in names})
    return read_deepseek_v4(read_config(folder), tensor_shapes(folder))


def flash(**changes: Any) -> dict[str, Any]:
    """Sizes of V4-Flash; its root config.json has these keys."""
    return (
        v4.bundled_config(
            vocab_size=129280,
            hidden_size=4096,
            moe_intermediate_size=2048,
            num_hidden_layers=43,
            num_attention_heads=64,
            head_dim=512,
            qk_rope_head_dim=64,
            q_lora_rank=1024,
            o_groups=8,
            o_lora_rank=1024,
            compress_ratios=[0, 0, *[4, 128] * 20, 4, 0, 0, 0],
            num_hash_layers=3,
            sliding_window=128,
            max_position_embeddings=1048576,
            index_n_heads=64,
            index_head_dim=128,
            index_topk=512,
            n_routed_experts=256,
            num_experts_per_tok=6,
            swiglu_limit=10.0,
        )
        | changes
    )


DSPARK_NAMES = (
    'mtp.0.main_proj.weight',
    'mtp.1.attn_norm.weight',
    'mtp.2.markov_head.markov_w1.weight',
    'mtp.2.confidence_head.proj.weight',
)


def test_flash(tmp_path: Path):
    config = read(tmp_path, flash(dspark_target_layer_ids=[40, 41, 42]), DSPARK_NAMES)
    assert config.num_layers == 43
    assert (config.ratios.count(0), config.ratios.count(4), config.ratios.count(128)) == (2, 21, 20)
    assert config.draft is not None
    assert (config.draft.num_stages, config.draft.taps, config.draft.has_confidence) == (3, (40, 41, 42), True)


def test_flash_has_as_many_tensors_as_were_published(tmp_path: Path):
    """72,317 with the scales of its FP8 and FP4 weights: 67,612 of the target, 4,705 of the heads."""
    shapes = implied_shapes(read(tmp_path, flash(dspark_target_layer_ids=[40, 41, 42]), DSPARK_NAMES))
    quantised = [
        name
        for name in shapes
        if name.removesuffix('.weight').rpartition('.')[2] in v4.QUANTISED_LINEARS and '.compressor.' not in name
    ]
    heads = [name for name in (*shapes, *quantised) if name.startswith('mtp.')]
    assert len(shapes) + len(quantised) == 72_317
    assert len(heads) == 4_705
    assert shapes['layers.2.attn.indexer.wq_b.weight'] == (64 * 128, 1024)
    assert shapes['layers.42.ffn.experts.255.w2.weight'] == (4096, 2048)
    assert shapes['mtp.0.main_proj.weight'] == (4096, 3 * 4096)


def test_pro(tmp_path: Path):
    sizes = {
        'hidden_size': 7168,
        'num_hidden_layers': 61,
        'num_attention_heads': 128,
        'q_lora_rank': 1536,
        'o_groups': 16,
        'index_topk': 1024,
        'n_routed_experts': 384,
        'moe_intermediate_size': 3072,
        'routed_scaling_factor': 2.5,
        'compress_ratios': [128, 128, *[4, 128] * 29, 4, 0],
    }
    config = read(tmp_path, flash(**sizes))
    assert (config.ratios.count(0), config.ratios.count(4), config.ratios.count(128)) == (0, 30, 31)
    assert (config.classic_mtp, config.draft) == (False, None)


def test_keys_of_transformers_say_the_same(case: Case, tmp_path: Path):
    case.model.save_pretrained(tmp_path)
    theirs = read_deepseek_v4(read_config(tmp_path), tensor_shapes(tmp_path))
    ours = read_deepseek_v4(read_config(case.folder), {})
    assert theirs == ours
    assert theirs.compress_rope == RopeConfig(160000.0, 'yarn', 16.0, 64, 32.0, 1.0, 1.0)


def test_classic_mtp_is_told_apart(tmp_path: Path):
    config = read(tmp_path, v4.config(), ('mtp.0.e_proj.weight', 'mtp.0.h_proj.weight'))
    assert (config.classic_mtp, config.draft) == (True, None)


@pytest.mark.parametrize(
    ('changes', 'field'),
    [
        ({'compress_ratios': None}, 'layer_types'),
        ({'compress_ratios': [0, 4, 2, 0, 4, 128]}, 'compress_ratios'),
        ({'compress_ratios': [0, 4]}, 'compress_ratios'),
        ({'scoring_func': 'softmax'}, 'scoring_func'),
        ({'n_shared_experts': 2}, 'n_shared_experts'),
        ({'vision_n_layers': 4}, 'vision_n_layers'),
        ({'o_groups': 3}, 'o_groups'),
        ({'num_experts_per_tok': 9}, 'num_experts_per_tok'),
        ({'quantization_config': {'quant_method': 'awq'}}, 'quantization_config.quant_method'),
        ({'expert_dtype': 'nvfp4'}, 'expert_dtype'),
        ({'dspark_target_layer_ids': [4, 3]}, 'dspark_target_layer_ids'),
        ({'dspark_target_layer_ids': [6]}, 'dspark_target_layer_ids'),
        ({'dspark_noise_token_id': 97}, 'dspark_noise_token_id'),
        ({'dspark_block_size': None}, 'dspark_block_size'),
    ],
)
def test_what_is_not_served_is_named(tmp_path: Path, changes: dict[str, Any], field: str):
    with pytest.raises(CheckpointError, match=field):
        read(tmp_path, {**v4.bundled_config(), **changes}, DSPARK_NAMES)
