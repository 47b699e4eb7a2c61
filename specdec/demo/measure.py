"""How many drafted tokens would be accepted on held-out code.

Speculation never changes the text: a draft is accepted while it equals what plain decoding picks. So acceptance can be
read off a finished text: propose from every position at once, then walk from anchor to anchor. Next: folders.py.
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from specdec.demo.generate import continue_text
from specdec.demo.networks import Draft, Target

ANCHORS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Over all texts: decode steps, tokens emitted by them (bonus included), and the k-th draft's share accepted.

    `position_rates[k]`: of the steps that accepted drafts 0..k-1, the share that accepted draft k as well.
    """

    steps: int
    tokens: int
    position_rates: tuple[float, ...]

    @property
    def mean_accepted_length(self) -> float:
        return self.tokens / self.steps

    def as_json(self) -> dict:
        return {'mean_accepted_length': round(self.mean_accepted_length, 3), **asdict(self)}


@torch.inference_mode()
def propose(target: Target, draft: Draft, ids: Tensor, starts: Tensor) -> Tensor:
    """Greedy proposals [anchors, num_proposals] from the positions `starts` [anchors] of the text ids [length]."""
    taps = target(ids[None], draft.plan.taps)[1]
    proposals = []
    for some in starts.split(ANCHORS_AT_ONCE):
        hidden = draft(taps, ids[some][None], some[None], target.embed_tokens)[0]
        logits = target.logits(hidden)
        previous, chain = ids[some], []
        for k in range(draft.plan.num_proposals):
            row = logits[:, k]
            if draft.plan.markov_rank:
                row = row + draft.markov_bias(previous)
            previous = row.argmax(-1)
            chain.append(previous)
        proposals.append(torch.stack(chain, 1))
    return torch.cat(proposals)


def accepted_counts(target: Target, draft: Draft, ids: Tensor, prompt_length: int) -> list[int]:
    """Accepted drafts of each step that would emit the text ids [length] after its prompt.

    The first emitted token comes from the prompt itself. Steps whose block would run past the text are left out.
    """
    num_proposals = draft.plan.num_proposals
    last = len(ids) - num_proposals
    if last <= prompt_length:
        return []
    starts = torch.arange(prompt_length, last, device=ids.device)
    drafted = propose(target, draft, ids, starts)
    truth = ids[starts[:, None] + torch.arange(1, num_proposals + 1, device=ids.device)]
    leading = (drafted == truth).long().cumprod(1).sum(1).tolist()
    counts, step = [], 0
    while step < len(leading):
        counts.append(leading[step])
        step += leading[step] + 1
    return counts


def measure(target: Target, draft: Draft, texts: list[tuple[Tensor, int]]) -> Acceptance:
    """Acceptance over texts, each (ids [length], prompt length)."""
    counts = [count for ids, prompt_length in texts for count in accepted_counts(target, draft, ids, prompt_length)]
    if not counts:
        raise ValueError('texts: every continuation is shorter than one block; continue them further')
    rates = []
    for k in range(draft.plan.num_proposals):
        reached = sum(count >= k for count in counts)
        rates.append(round(sum(count > k for count in counts) / reached, 4) if reached else 0.0)
    return Acceptance(len(counts), sum(counts) + len(counts), tuple(rates))


def continuations(
    target: Target, prompts: list[list[int]], num_tokens: int, temperature: float, generator: torch.Generator
) -> list[tuple[Tensor, int]]:
    """Continue every prompt (ids) with plain decoding; -> (prompt and continuation, prompt length) each."""
    device = target.embed_tokens.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    padded = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long, device=device)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    temperatures = torch.full((len(prompts),), temperature, device=device)
    emitted = continue_text(target, padded, lengths, num_tokens, temperatures, generator)
    return [
        (torch.cat([row[: len(prompt)], new]), len(prompt))
        for row, new, prompt in zip(padded, emitted, prompts, strict=True)
    ]
