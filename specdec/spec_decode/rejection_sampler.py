"""The verdict on a step: which drafts are accepted, what is emitted, and where a request ends.

One rule: a draft equal to the row's pick is accepted, else the pick is emitted and the block ends. The text is then the
target's own pick at every position, whatever the draft (docs/exactness.md). Next: agent/model_agent.py commits it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.spec_decode.logits import Sampling, Stages, pick_tokens

RUNNING, STOPPED, FULL = range(3)  # finish codes


@dataclass(frozen=True, slots=True)
class Verdict:
    """P requests: `tokens` [P, K + 1], of which the first `counts` [P] are emitted; `finish` [P] codes.

    `committed` [P]: rows that now belong to the sequence, accepted drafts and anchor; `next_tokens` [P]: the last token
    emitted, the next anchor.
    """

    tokens: Tensor
    counts: Tensor
    committed: Tensor
    next_tokens: Tensor
    finish: Tensor


def verify(
    logits: Tensor,
    requests: Tensor,
    offsets: Tensor,
    draw_positions: Tensor,
    drafts: Tensor,
    verify_lengths: Tensor,
    sampling: Sampling,
    stages: Stages,
) -> Verdict:
    """logits [R, V] fp32 of the packed rows, `requests` [R], `offsets` [P + 1], `draw_positions` [R]; drafts [P, K]
    of which the first verify_lengths [P] have rows.
    """
    picks = pick_tokens(logits, requests, draw_positions, sampling, stages)
    step = torch.arange(drafts.shape[1] + 1, device=picks.device)
    starts = offsets[:-1]
    tokens = picks[starts[:, None] + step.minimum(verify_lengths[:, None])]
    matches = (tokens[:, :-1] == drafts) & (step[:-1] < verify_lengths[:, None])
    accepted = matches.cumprod(1).sum(1)
    return _cut(tokens, accepted, step, draw_positions[starts], sampling)


def _cut(tokens: Tensor, accepted: Tensor, step: Tensor, first: Tensor, sampling: Sampling) -> Verdict:
    """End at the first stop id or at the request's limit; at one token the stop wins. `first` [P]: position of token 0.

    Stop ids below the minimum length are banned before the pick, so none needs to be excused here.
    """
    emitted = accepted + 1
    is_stop = (tokens[:, :, None] == sampling.stop_ids[:, None, :]).any(-1)
    is_stop &= step < emitted[:, None]
    before_stop = (is_stop.cumsum(1) == 0).sum(1)
    # a request that ended in a step not read yet may have one more step under way: nothing is left for it to emit
    counts = (before_stop + 1).minimum(emitted).minimum(sampling.end - first).clamp(min=0)
    last = (counts[:, None] - 1).clamp(min=0)
    stopped = is_stop.gather(1, last).squeeze(1)
    full = first + counts >= sampling.end
    finish = torch.where(stopped, STOPPED, torch.where(full, FULL, RUNNING))
    return Verdict(tokens, counts, emitted, tokens.gather(1, last).squeeze(1), finish)


def emitted_logprobs(logits: Tensor, ids: Tensor, alternatives: int) -> tuple[Tensor, Tensor, Tensor]:
    """Raw log-softmax of rows [R, V] at `ids` [R], and the `alternatives` best: -> ([R], values [R, n], ids [R, n])."""
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(alternatives, logprobs.shape[1]), -1)
    return logprobs.gather(1, ids[:, None]).squeeze(1), best.values, best.indices
