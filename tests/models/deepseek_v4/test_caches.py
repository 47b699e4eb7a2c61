"""Sizes: what the specs say, what they allocate, and the inventory of the model's own documentation."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.layers.cache_specs import CacheRoom
from specdec.models.checkpoint import read_config, tensor_shapes
from specdec.models.deepseek_v4.caches import DeepseekV4CacheSpec, DraftRingSpec
from specdec.models.deepseek_v4.config import DeepseekV4Config, read_deepseek_v4
from tests.models.deepseek_v4.conftest import Case

CPU = torch.device('cpu')


@pytest.fixture(scope='module')
def config(case: Case) -> DeepseekV4Config:
    return read_deepseek_v4(read_config(case.folder), tensor_shapes(case.folder))


def num_bytes(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.itemsize for t in tensors)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('num_drafts', [0, 5])
@pytest.mark.parametrize('page_size', [128, 256])
def test_target_bytes_are_those_allocated(
    config: DeepseekV4Config, dtype: torch.dtype, num_drafts: int, page_size: int
):
    spec, room = DeepseekV4CacheSpec(config, num_drafts, dtype), CacheRoom(3, page_size, 4, num_states=2)
    caches = spec.allocate(room, CPU)
    partials = [p for layer in caches.layers for p in (layer.entries, layer.keys) if p is not None]
    assert num_bytes([ring.rows for ring in caches.rings]) == room.num_slots * spec.bytes_per_slot
    assert num_bytes([ring.saved for ring in caches.rings]) == (room.num_states + 1) * spec.bytes_per_state
    assert num_bytes([p.pages for p in partials]) == room.num_pages * room.page_size * spec.bytes_per_token


def test_draft_bytes_are_those_allocated(config: DeepseekV4Config):
    assert config.draft is not None
    spec = DraftRingSpec(config, config.draft, torch.float32)
    rings = spec.allocate(CacheRoom(3, 128, 4, num_states=2), CPU).windows
    assert num_bytes([ring.rows for ring in rings]) == 4 * spec.bytes_per_slot
    assert num_bytes([ring.saved for ring in rings]) == 3 * spec.bytes_per_state
    assert spec.bytes_per_token == 0


def test_the_flash_model_takes_what_its_layers_add_up_to(config: DeepseekV4Config):
    """bf16 rows and fp32 partial states at the release's sizes; rings have K = 5 rows more than they look back."""
    flash = replace(config, ratios=(0, 0, *(4, 128) * 20, 4), head_dim=512, index_dim=128, window=128)
    spec = DeepseekV4CacheSpec(flash, 5, torch.bfloat16)
    windows = 43 * (128 + 5) * 512 * 2
    ratio_4 = 21 * (8 + 5) * 2 * 2 * (512 + 128) * 4
    ratio_128 = 20 * (128 + 5) * 2 * 512 * 4
    assert spec.bytes_per_slot == windows + ratio_4 + ratio_128
    assert spec.bytes_per_token == 21 * (512 + 128) * 2 / 4 + 20 * 512 * 2 / 128
