"""A tiny Qwen3.5 that has learnt a language, and the demo's DFlash and DSpark drafts, distilled from it.

`python -m tests.helpers.hybrid_training` makes tests/data/hybrid. The target is trained with transformers' own modules,
the drafts with the demo's script (specdec/demo/train.py). Random weights exercise every formula; only trained ones show
that drafts which are often right, and often not, leave the state alone.
"""

import argparse
import dataclasses
import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from specdec.demo.folders import write_dflash, write_dspark
from specdec.demo.machine import Machine
from specdec.demo.networks import Draft
from specdec.demo.train import Recipe, train_drafts
from tests.helpers.deepseek_v4_training import Language, language, schedule
from tests.helpers.hybrid import SMALL

FOLDER = Path(__file__).parent.parent / 'data' / 'hybrid'
LENGTH, BATCH, MASK = 160, 12, 63
CHANGES = {
    'vocab_size': 64,
    'hidden_size': 64,
    'intermediate_size': 128,
    'max_position_embeddings': 2048,
    'linear_key_head_dim': 16,
    'linear_value_head_dim': 16,
    'layer_types': ['linear_attention', 'linear_attention', 'full_attention', 'linear_attention'],
    'eos_token_id': 62,
}
RECIPE = Recipe(
    vocab_size=64,
    hidden_size=64,
    head_dim=16,
    max_position=2048,
    target_layers=4,
    taps=(0, 1, 2, 3),
    draft_layers=2,
    draft_heads=4,
    draft_intermediate=128,
    markov_rank=32,
    draft_batch=16,
    blocks_per_row=16,
    real_rows=8,
    text_length=LENGTH,
    warmup_steps=20,
)


class Teacher(nn.Module):
    """transformers' model as the demo's script sees a target."""

    def __init__(self, model: Qwen3_5ForCausalLM) -> None:
        super().__init__()
        self.model, self.layers, self.embed_tokens = model, nn.ModuleList(), model.model.embed_tokens

    def forward(self, ids: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        streams: dict[int, Tensor] = {}
        handles = [
            layer.register_forward_hook(lambda _m, _x, out, i=i: streams.__setitem__(i, out))
            for i, layer in enumerate(self.model.model.layers)
        ]
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        for handle in handles:
            handle.remove()
        return hidden, torch.cat([streams[i] for i in taps], -1)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(hidden)


def train_target(spoken: Language, steps: int, rate: float = 3e-3) -> Qwen3_5ForCausalLM:
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**SMALL, **CHANGES, 'tie_word_embeddings': True})).train()
    optimiser = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.01)
    rates, started = schedule(optimiser, steps), time.time()
    for step in range(steps):
        ids = torch.tensor([spoken.text(LENGTH, 10_000 + BATCH * step + i) for i in range(BATCH)])
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        rates.step()
        if step % 50 == 0:
            print(f'target {step:5d} loss {loss:.3f} {time.time() - started:.0f} s', flush=True)
    return model.eval().requires_grad_(False)


def make(folder: Path, target_steps: int, draft_steps: int, texts: int = 400) -> None:
    """Train target and drafts and write `folder`/{target,dflash,dspark}, in bfloat16."""
    torch.manual_seed(0)
    spoken = language()
    shutil.rmtree(folder, ignore_errors=True)
    train_target(spoken, target_steps).to(torch.bfloat16).save_pretrained(folder / 'target')
    model = Qwen3_5ForCausalLM.from_pretrained(folder / 'target', dtype=torch.float32).eval().requires_grad_(False)
    teacher = Teacher(model)
    recipe = dataclasses.replace(RECIPE, draft_steps=draft_steps)
    drafts = {method: Draft(recipe.draft(method, MASK)) for method in ('dflash', 'dspark')}
    ids = torch.tensor([spoken.text(LENGTH, 900_000 + i) for i in range(texts)])
    earliest = torch.ones(texts, dtype=torch.int64)
    train_drafts(recipe, teacher, drafts, ids, earliest, ids.flatten(), Machine(torch.device('cpu')))
    (folder / 'target' / 'model.safetensors').chmod(0o644)
    write_dflash(folder / 'dflash', drafts['dflash'])
    write_dspark(folder / 'dspark', drafts['dspark'], teacher)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--folder', type=Path, default=FOLDER)
    parser.add_argument('--target-steps', type=int, default=500)
    parser.add_argument('--draft-steps', type=int, default=500)
    settings = parser.parse_args()
    make(settings.folder, settings.target_steps, settings.draft_steps)


if __name__ == '__main__':
    main()
