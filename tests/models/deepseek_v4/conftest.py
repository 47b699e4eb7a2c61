"""One tiny checkpoint with bundled heads, and what transformers says of two sequences; built once."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM

from tests.helpers import deepseek_v4 as v4

LENGTH = 300  # 75 entries of ratio 4 (6 are chosen), 2 of ratio 128, 18 windows


@dataclass(frozen=True, slots=True)
class Case:
    folder: Path
    model: DeepseekV4ForCausalLM
    heads: v4.ReferenceDraft
    ids: Tensor
    logits: Tensor
    taps: Tensor


@pytest.fixture(scope='package')
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)  # tensors this small take far longer with more
    model, heads = v4.build_target(), v4.build_draft()
    folder = v4.write_bundled(tmp_path_factory.mktemp('v4') / 'bundled', model, heads)
    ids = torch.randint(2, v4.VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    return Case(folder, model, heads, ids, *v4.reference_logits(model, ids))
