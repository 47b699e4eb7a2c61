"""A tiny DeepSeek-V4 that has learnt a language, and DSpark heads that have learnt to guess it.

`python -m tests.helpers.deepseek_v4_training` makes tests/data/deepseek_v4, in the release's quantised layout. Random
weights exercise every formula; only trained ones show that the heads' drafts are of use.
"""

import argparse
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM

from tests.helpers import deepseek_v4 as v4

FOLDER = Path(__file__).parent.parent / 'data' / 'deepseek_v4'
LENGTH, BATCH, ANCHORS = 160, 8, 24
CHANGES = {
    'num_hidden_layers': 4,
    'compress_ratios': [0, 4, 128, 4, 0, 0],
    'num_hash_layers': 1,
    'hc_sinkhorn_iters': 6,
    'n_routed_experts': 4,
    'swiglu_limit': 10.0,
}
STAGES, TAPS = 2, (1, 2, 3)


# ----------------------------------------------------------------------------------------------------- a language
@dataclass(frozen=True, slots=True)
class Language:
    """Phrases of 4 to 8 tokens; behind each follows one of two others, the first four times out of five.

    Phrases share tokens, so that the next token depends on more than the one before.
    """

    phrases: tuple[tuple[int, ...], ...]
    successors: tuple[tuple[int, int], ...]

    def text(self, length: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        phrase = int(torch.randint(0, len(self.phrases), (1,), generator=generator))
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += self.phrases[phrase]
            likely = bool(torch.rand(1, generator=generator) < 0.8)
            phrase = self.successors[phrase][0 if likely else 1]
        return tokens[:length]


def language(seed: int = 5) -> Language:
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int, count: int) -> tuple[int, ...]:
        return tuple(torch.randint(low, high, (count,), generator=generator).tolist())

    phrases = tuple(drawn(2, 60, length) for length in drawn(4, 9, 32))
    return Language(phrases, tuple(drawn(0, 32, 2) for _ in range(32)))  # type: ignore[misc]


def batches(spoken: Language, steps: int, seed: int) -> list[Tensor]:
    """Token ids [BATCH, LENGTH] for each step."""
    return [torch.tensor([spoken.text(LENGTH, seed + BATCH * step + i) for i in range(BATCH)]) for step in range(steps)]


# ------------------------------------------------------------------------------------------------------- training
def schedule(optimiser: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    warm = max(1, steps // 20)
    return torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warm, 1.0) * max(0.05, 1 - step / steps)
    )


def train_target(spoken: Language, steps: int, rate: float = 3e-3) -> DeepseekV4ForCausalLM:
    model = v4.build_target(3, **CHANGES).train()
    optimiser = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.01)
    rates, started = schedule(optimiser, steps), time.time()
    for step, ids in enumerate(batches(spoken, steps, 10_000)):
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        _update(model.parameters(), optimiser, rates, loss)
        if step % 50 == 0:
            print(f'target {step:5d} loss {loss:.3f} {time.time() - started:.0f} s', flush=True)
    return model.eval()


def train_draft(spoken: Language, target: DeepseekV4ForCausalLM, steps: int, rate: float = 3e-3) -> v4.ReferenceDraft:
    """Blocks behind random anchors, each token given the true one before it; labels are what the target would say."""
    draft = v4.build_draft(4, STAGES, TAPS, **CHANGES)
    own = [draft.main_proj, draft.main_norm, draft.markov_w1, draft.markov_w2, draft.confidence]
    learned = [*draft.stages.train().parameters(), *(tensor.requires_grad_() for tensor in own)]
    optimiser = torch.optim.AdamW(learned, rate, betas=(0.9, 0.95), weight_decay=0.01)
    rates, started = schedule(optimiser, steps), time.time()
    generator = torch.Generator().manual_seed(0)
    for step, ids in enumerate(batches(spoken, steps, 900_000)):
        logits, taps = v4.reference_logits(target, ids, TAPS)
        starts = torch.randint(v4.WINDOW, LENGTH - v4.BLOCK, (BATCH, ANCHORS), generator=generator)
        offsets = torch.arange(v4.BLOCK)
        rows = torch.arange(BATCH)[:, None, None]
        before = ids[rows, starts[..., None] + offsets].flatten(0, 1)
        labels = logits.argmax(-1)[rows, starts[..., None] + offsets].flatten(0, 1)
        windows = taps[rows, starts[..., None] + torch.arange(-v4.WINDOW, 0)].flatten(0, 1)
        hidden = draft.hidden(target, windows, before[:, 0], starts.flatten())
        embedded = draft.markov_w1[before]
        guesses = target.lm_head(draft.stages.model.norm(hidden)) + embedded @ draft.markov_w2.T
        sure = (torch.cat([hidden, embedded], -1).detach() @ draft.confidence.T)[..., 0]
        right = (guesses.argmax(-1) == labels).float()
        loss = F.cross_entropy(guesses.flatten(0, 1), labels.flatten())
        total = loss + F.binary_cross_entropy_with_logits(sure, right)
        _update(learned, optimiser, rates, total)
        if step % 50 == 0:
            print(f'draft {step:5d} loss {loss:.3f} right {right.mean():.3f} {time.time() - started:.0f} s', flush=True)
    draft.stages.eval()
    for tensor in own:
        tensor.requires_grad_(False)
    return draft


def _update(parameters, optimiser, rates, loss: Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimiser.step()
    rates.step()


def make(folder: Path, target_steps: int, draft_steps: int) -> None:
    """Train both and write the checkpoint: FP8, FP4 and bfloat16, as releases are."""
    torch.manual_seed(0)
    spoken = language()
    target = train_target(spoken, target_steps)
    draft = train_draft(spoken, target, draft_steps)
    shutil.rmtree(folder, ignore_errors=True)
    settings = v4.bundled_config(TAPS, torch_dtype='bfloat16', **CHANGES)
    v4.write(folder, settings, v4.quantise(v4.target_tensors(target) | v4.draft_tensors(draft)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--folder', type=Path, default=FOLDER)
    parser.add_argument('--target-steps', type=int, default=400)
    parser.add_argument('--draft-steps', type=int, default=300)
    settings = parser.parse_args()
    make(settings.folder, settings.target_steps, settings.draft_steps)


if __name__ == '__main__':
    main()
