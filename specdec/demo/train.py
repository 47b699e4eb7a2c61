"""`python -m specdec.demo.train --out FOLDER`: train the demo's target, then distil its two drafts, then measure.

Every stage is seeded; a GPU takes minutes, a CPU days at the full size (`--help` shows how to ask for less). What comes
out is what the package ships: three folders and training.json. Numbers and reasons: docs/demo.md.
"""

import argparse
import dataclasses
import json
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from specdec.demo.data import MASK, Corpus, encode_stream, read_corpus, train_tokenizer
from specdec.demo.folders import read_draft, read_target, write_dflash, write_dspark, write_target
from specdec.demo.generate import continue_text
from specdec.demo.machine import CapturedStep, Learner, Machine
from specdec.demo.measure import continuations, measure
from specdec.demo.networks import Draft, DraftPlan, Target
from specdec.demo.prompts import Prompt, held_out_prompts
from specdec.models.configs import DecoderConfig, RopeConfig

ROW_DECAY = 4.0  # row k of a block weighs exp(-k / 4) in every draft loss
CROSS_ENTROPY_WEIGHT, DISTANCE_WEIGHT = 0.1, 0.9  # of DSpark's loss; its confidence term weighs 1


@dataclass(frozen=True, slots=True)
class Recipe:
    """Every size and step count of the run; the defaults made the packaged checkpoints."""

    seed: int = 0
    vocab_size: int = 1024
    hidden_size: int = 160
    head_dim: int = 32
    num_kv_heads: int = 2
    rope_theta: float = 10_000.0
    max_position: int = 1024
    # The target: deep and narrow, because at batch 1 a layer costs time whatever its width.
    target_layers: int = 16
    target_heads: int = 4
    target_intermediate: int = 352
    target_steps: int = 3_000
    target_batch: int = 32
    target_length: int = 1024
    target_rate: float = 3e-3
    # The drafts: one backbone, the same text, the same steps.
    taps: tuple[int, ...] = (1, 5, 9, 12, 14)
    draft_layers: int = 2
    draft_heads: int = 8
    draft_intermediate: int = 448
    num_proposals: int = 7
    markov_rank: int = 64
    draft_steps: int = 11_000
    draft_batch: int = 64
    draft_rate: float = 3e-3
    blocks_per_row: int = 32
    real_rows: int = 8  # of draft_batch: rows of library code instead of the target's own text
    # The target's own text: library code of one of these lengths, continued to `text_length`.
    text_length: int = 768
    text_prompts: tuple[int, ...] = (128, 256, 448)
    texts_per_prompt: int = 8192
    texts_at_once: int = 4096
    warmup_steps: int = 200
    weight_decay: float = 0.1
    measured_tokens: int = 256

    def decoder(self, layers: int, heads: int, intermediate: int) -> DecoderConfig:
        return DecoderConfig(
            hidden_size=self.hidden_size,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=intermediate,
            rms_norm_eps=1e-6,
            vocab_size=self.vocab_size,
            rope=RopeConfig(self.rope_theta),
            max_position=self.max_position,
        )

    def target(self) -> DecoderConfig:
        return self.decoder(self.target_layers, self.target_heads, self.target_intermediate)

    def draft(self, method: str, mask_id: int) -> DraftPlan:
        """The same backbone and the same number of proposals; only rows and heads differ."""
        dspark = method == 'dspark'
        return DraftPlan(
            decoder=self.decoder(self.draft_layers, self.draft_heads, self.draft_intermediate),
            taps=self.taps,
            block_rows=self.num_proposals if dspark else self.num_proposals + 1,
            anchor_predicts=dspark,
            markov_rank=self.markov_rank if dspark else 0,
            mask_id=mask_id,
            num_target_layers=self.target_layers,
        )


class Progress:
    """Step, figures and time left: one line rewritten on a terminal, a new line every five seconds elsewhere."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total = title, total
        self.terminal = sys.stderr.isatty()
        self.started = self.shown = time.monotonic()

    def due(self, done: int) -> bool:
        return done == self.total or time.monotonic() - self.shown > (0.2 if self.terminal else 5.0)

    def show(self, done: int, figures: str = '') -> None:
        self.shown = time.monotonic()
        spent = self.shown - self.started
        bar = '#' * (20 * done // self.total)
        left = spent * (self.total - done) / done
        line = f'{self.title:<12} [{bar:<20}] {done}/{self.total} {figures} {spent:.0f} s, {left:.0f} s left'
        end = '\n' if not self.terminal or done == self.total else ''
        print(f'\r\x1b[2K{line}' if self.terminal else line, end=end, file=sys.stderr, flush=True)


def train(
    recipe: Recipe, corpus: Corpus, prompts: list[Prompt], out: Path, device: torch.device, trained: Path | None = None
) -> dict:
    """Run every stage, write `out`/{target,dflash,dspark} and `out`/training.json, and return what the latter says.

    `trained`: an earlier target folder with its tokenizer, to distil from instead of training one.
    """
    torch.manual_seed(recipe.seed)
    machine = Machine(device)
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    folder = trained or out / 'target'
    if trained is None:
        tokenizer = train_tokenizer(list(corpus.training.values()), recipe.vocab_size)
    else:
        tokenizer = Tokenizer.from_file(str(trained / 'tokenizer.json'))
    stream = torch.tensor(encode_stream(tokenizer, list(corpus.training.values())), device=device)
    print(f'corpus {corpus.digest} files {len(corpus.training)} tokens {len(stream)}', flush=True)
    if trained is None:
        target = train_target(recipe, stream, machine)
        write_target(folder, target, tokenizer)
    target_seconds = time.monotonic() - began

    # From here on the target is what the folder holds: its rounding to bf16 is part of what drafts must predict.
    target = read_target(folder, device)
    texts, prompt_lengths = target_texts(recipe, target, stream, machine)
    drafts = {
        method: Draft(recipe.draft(method, tokenizer.token_to_id(MASK))).to(device) for method in ('dflash', 'dspark')
    }
    train_drafts(recipe, read_target(folder, device), drafts, texts, prompt_lengths, stream, machine)
    write_dflash(out / 'dflash', drafts['dflash'])
    write_dspark(out / 'dspark', drafts['dspark'], target)
    draft_seconds = time.monotonic() - began - target_seconds

    report = {
        'corpus': {
            'sha256': corpus.digest,
            'files': len(corpus.training),
            'characters': sum(map(len, corpus.training.values())),
            'tokens': len(stream),
        },
        'recipe': dataclasses.asdict(recipe),
        'device': torch.cuda.get_device_name() if machine.cuda else 'cpu',
        'torch': torch.__version__,
        'python': sys.version.split()[0],
        'seconds': {'target': round(target_seconds), 'drafts': round(draft_seconds)},
        'held_out_loss': held_out_loss(recipe, target, tokenizer, corpus),
        'acceptance': acceptance(recipe, target, out, tokenizer, prompts),
    }
    (out / 'training.json').write_text(json.dumps(report, indent=2) + '\n', encoding='utf-8')
    return report


def train_target(recipe: Recipe, stream: Tensor, machine: Machine) -> Target:
    """Next-token cross-entropy on random windows of the stream."""
    model = Target(recipe.target()).to(machine.device)
    machine.compile_layers(model)
    generator = machine.generator(recipe.seed + 1)
    learner = Learner(model, recipe.target_rate, recipe.target_steps, recipe.warmup_steps, recipe.weight_decay, machine)

    def learn(windows: Tensor) -> tuple[Tensor]:
        with machine.autocast():
            logits = model.logits(model(windows[:, :-1])[0])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
        learner.learn(loss)
        return (loss.detach(),)

    step_once = CapturedStep(learn, machine.device)
    progress = Progress('target', recipe.target_steps)
    for step in range(1, recipe.target_steps + 1):
        learner.set_rate(step)
        (loss,) = step_once(random_windows(stream, recipe.target_batch, recipe.target_length + 1, generator))
        if progress.due(step):
            progress.show(step, f'loss {loss.item():.3f}')
    return model


def target_texts(recipe: Recipe, target: Target, stream: Tensor, machine: Machine) -> tuple[Tensor, Tensor]:
    """The target's own text: library code of each prompt length, continued; half of it greedily, a quarter each at
    temperatures 0.6 and 1. Returns ids [texts, text_length] and the prompt lengths [texts].
    """
    writer = deepcopy(target).to(torch.bfloat16 if machine.cuda else torch.float32)
    generator = machine.generator(recipe.seed + 2)
    texts, lengths = [], []
    total = len(recipe.text_prompts) * recipe.texts_per_prompt
    progress = Progress('texts', total)
    for prompt_length in recipe.text_prompts:
        for first in range(0, recipe.texts_per_prompt, recipe.texts_at_once):
            count = min(recipe.texts_at_once, recipe.texts_per_prompt - first)
            prompts = random_windows(stream, count, prompt_length, generator)
            temperatures = torch.tensor([0.0, 0.6, 0.0, 1.0], device=machine.device).repeat(-(-count // 4))[:count]
            sizes = torch.full((count,), prompt_length, device=machine.device)
            new = recipe.text_length - prompt_length
            texts.append(torch.cat([prompts, continue_text(writer, prompts, sizes, new, temperatures, generator)], 1))
            lengths.append(sizes)
            progress.show(sum(map(len, texts)))
    return torch.cat(texts), torch.cat(lengths)


def train_drafts(
    recipe: Recipe,
    target: Target,
    drafts: dict[str, Draft],
    texts: Tensor,
    prompt_lengths: Tensor,
    stream: Tensor,
    machine: Machine,
) -> None:
    """Distil both drafts in one loop: the same rows, the same anchors, the same step count, an optimizer each.

    Anchors are random positions of the target's own part of a text, or anywhere in rows of library code.
    """
    losses: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {'dflash': dflash_loss, 'dspark': dspark_loss}
    learners = {}
    for method, draft in drafts.items():
        learners[method] = Learner(
            draft, recipe.draft_rate, recipe.draft_steps, recipe.warmup_steps, recipe.weight_decay, machine
        )
    for model in (target, *drafts.values()):
        machine.compile_layers(model)

    def learn(ids: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
        rows = starts[:, :, None] + torch.arange(recipe.num_proposals + 1, device=ids.device)
        block = ids.gather(1, rows.flatten(1)).view_as(rows)  # the anchor and the tokens to be proposed
        with torch.no_grad(), machine.autocast():
            hidden, taps = target(ids, recipe.taps)
            index = rows[:, :, :-1].flatten(1)[:, :, None].expand(-1, -1, hidden.shape[-1])
            truth = target.logits(hidden.gather(1, index)).float().softmax(-1).unflatten(1, rows[0, :, :-1].shape)
        agreed = []
        for method, draft in drafts.items():
            with machine.autocast():
                drafted = draft(taps, block[:, :, 0], starts, target.embed_tokens)
                loss, logits = losses[method](draft, drafted, target.logits(drafted), block, truth)
            learners[method].learn(loss)
            agreed.append(agreement(logits.detach(), block))
        return tuple(agreed)

    step_once = CapturedStep(learn, machine.device)
    progress = Progress('drafts', recipe.draft_steps)
    batches = draft_batches(recipe, texts, prompt_lengths, stream, machine)
    for step in range(1, recipe.draft_steps + 1):
        for learner in learners.values():
            learner.set_rate(step)
        agreed = step_once(*next(batches))
        if progress.due(step):
            figures = [f'{method} {value.item():.2f}' for method, value in zip(drafts, agreed, strict=True)]
            progress.show(step, 'tokens a step: ' + ', '.join(figures))


def draft_batches(
    recipe: Recipe, texts: Tensor, prompt_lengths: Tensor, stream: Tensor, machine: Machine
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (ids [draft_batch, text_length], anchor positions [draft_batch, blocks_per_row])."""
    generator = machine.generator(recipe.seed + 3)
    device = machine.device
    own_rows = recipe.draft_batch - recipe.real_rows
    while True:
        chosen = torch.randint(len(texts), (own_rows,), generator=generator, device=device)
        real = random_windows(stream, recipe.real_rows, recipe.text_length, generator)
        earliest = torch.cat([prompt_lengths[chosen], prompt_lengths.new_ones(recipe.real_rows)])[:, None]
        places = torch.rand(recipe.draft_batch, recipe.blocks_per_row, generator=generator, device=device)
        choices = recipe.text_length - recipe.num_proposals - earliest
        yield torch.cat([texts[chosen], real]), earliest + (places * choices).long()


def row_weights(logits: Tensor) -> Tensor:
    """exp(-k / 4) for the rows of logits [batch, blocks, rows, vocab], divided by their sum over all blocks."""
    batch, blocks, rows, _ = logits.shape
    weights = torch.exp(-torch.arange(rows, device=logits.device) / ROW_DECAY)
    return weights / (weights.sum() * batch * blocks)


def dflash_loss(draft: Draft, hidden: Tensor, logits: Tensor, block: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy with the tokens that followed. Returns the loss and the logits it judged.

    hidden [batch, blocks, g, hidden], logits [.., g, vocab]; block [.., g + 1] ids, the anchor first; truth: unused.
    """
    del draft, hidden, truth
    logits = logits.float()
    return (cross_entropy(logits, block[:, :, 1:]) * row_weights(logits)).sum(), logits


def dspark_loss(draft: Draft, hidden: Tensor, logits: Tensor, block: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """0.1 cross-entropy + 0.9 L1 distance to the target's distribution truth [.., g, vocab] + confidence BCE.

    1 - L1 / 2 is the probability that rejection sampling accepts; the confidence head learns to foretell it. The Markov
    head is fed the true previous tokens. Shapes and result as `dflash_loss`.
    """
    previous = block[:, :, :-1]
    logits = logits.float() + draft.markov_bias(previous).float()
    distance = (logits.softmax(-1) - truth).abs().sum(-1)
    agreeing = (1 - distance / 2).detach().clamp(0, 1)
    confidence = draft.confidence_logits(hidden, previous).float()
    rows = (
        CROSS_ENTROPY_WEIGHT * cross_entropy(logits, block[:, :, 1:])
        + DISTANCE_WEIGHT * distance
        + functional.binary_cross_entropy_with_logits(confidence, agreeing, reduction='none')
    )
    return (rows * row_weights(logits)).sum(), logits


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Per row: logits [..., vocab], labels [...] -> [...]."""
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction='none').view_as(labels)


def agreement(logits: Tensor, block: Tensor) -> Tensor:
    """Tokens a step would emit, were each block verified against the text (Markov fed the true tokens)."""
    return 1 + (logits.argmax(-1) == block[:, :, 1:]).long().cumprod(-1).sum(-1).float().mean()


def random_windows(stream: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """[count, length] ids from random places of the stream."""
    places = torch.randint(len(stream) - length + 1, (count, 1), generator=generator, device=stream.device)
    return stream[places + torch.arange(length, device=stream.device)]


@torch.inference_mode()
def held_out_loss(recipe: Recipe, target: Target, tokenizer: Tokenizer, corpus: Corpus) -> float | None:
    """Nats a token on the held-out files, in fp32; None where the sources hold none of them."""
    ids = torch.tensor(encode_stream(tokenizer, list(corpus.held_out.values())), device=target.norm.weight.device)
    windows = ids[: len(ids) // recipe.target_length * recipe.target_length].view(-1, recipe.target_length)
    if not len(windows):
        return None
    losses = []
    for some in windows.split(8):
        logits = target.logits(target(some)[0])[:, :-1]
        losses.append(functional.cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten()).item() * len(some))
    return round(sum(losses) / len(windows), 4)


def acceptance(
    recipe: Recipe, target: Target, out: Path, tokenizer: Tokenizer, prompts: list[Prompt]
) -> dict[str, dict[str, dict]]:
    """Both drafts as written, on continuations of the held-out prompts, greedy and at temperature 1, in fp32."""
    device = target.norm.weight.device
    ids = [tokenizer.encode(prompt.text).ids for prompt in prompts]
    generator = torch.Generator(device).manual_seed(recipe.seed + 4)
    results: dict[str, dict[str, dict]] = {}
    for name, temperature in (('greedy', 0.0), ('temperature_1', 1.0)):
        texts = continuations(target, ids, recipe.measured_tokens, temperature, generator)
        results[name] = {
            method: measure(target, read_draft(out / method, device), texts).as_json()
            for method in ('dflash', 'dspark')
        }
    return results


def main(arguments: list[str] | None = None) -> None:
    recipe = Recipe()
    parser = argparse.ArgumentParser(prog='python -m specdec.demo.train', description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, required=True, help='folder to write target, dflash, dspark to')
    parser.add_argument('--sources', type=Path, help="Python sources to learn (default: this Python's library)")
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--seed', type=int, default=recipe.seed)
    parser.add_argument('--steps', type=int, default=recipe.target_steps, help='of the target (%(default)s)')
    parser.add_argument('--draft-steps', type=int, default=recipe.draft_steps, help='of the drafts (%(default)s)')
    parser.add_argument('--texts', type=int, default=recipe.texts_per_prompt, help='the target writes, per length')
    parser.add_argument('--target', type=Path, help='a trained target folder: only distil drafts from it')
    options = parser.parse_args(arguments)
    recipe = dataclasses.replace(
        recipe,
        seed=options.seed,
        target_steps=options.steps,
        draft_steps=options.draft_steps,
        texts_per_prompt=options.texts,
    )
    corpus = read_corpus(options.sources or Path(sysconfig.get_path('stdlib')))
    prompts = held_out_prompts()
    report = train(recipe, corpus, prompts, options.out, torch.device(options.device), options.target)
    print(json.dumps({key: report[key] for key in ('seconds', 'held_out_loss', 'acceptance')}, indent=2))


if __name__ == '__main__':
    main()
