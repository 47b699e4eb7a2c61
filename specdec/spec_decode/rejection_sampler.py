"""The verdict on a step: which drafts are accepted, what is emitted, and where a request ends.

One rule: a draft equal to the row's pick is accepted, else the pick is emitted and the block ends. The text is then the
target's own pick at every position, whatever the draft (docs/exactness.md). Only requests that ask for probabilistic
drafts are tested by min(1, p / q) instead. Next: agent/model_agent.py commits the verdict.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.noise import ACCEPT, RESIDUAL, gumbel, uniform
from specdec.kernels.pick import NO_PICK
from specdec.plan import Stage
from specdec.spec_decode.logits import PROBABILISTIC, LogitRows, Processed, Sampling, pick_tokens, process
from specdec.spec_decode.rules import Rules

RUNNING, STOPPED, FULL, STUCK = range(4)  # finish codes; STUCK: the rules left no id


@dataclass(frozen=True, slots=True)
class Verdict:
    """P requests: `tokens` [P, K + 1], of which the first `counts` [P] are emitted; `finish` [P] codes.

    `committed` [P]: rows that now belong to the sequence, accepted drafts and anchor; `next_tokens` [P]: the last token
    emitted, the next anchor. `processed`: what the rows' tokens were drawn from.
    """

    tokens: Tensor
    counts: Tensor
    committed: Tensor
    next_tokens: Tensor
    finish: Tensor
    processed: Processed


def verify(
    logits: Tensor,
    rows: LogitRows,
    sampling: Sampling,
    stages: Stage,
    rules: Rules | None = None,
    draft_probabilities: Tensor | None = None,
    top_k: int = 0,
) -> Verdict:
    """logits [R, V] fp32 of the packed rows. `rules`: tables behind the stages; `draft_probabilities` [P, K, V]: q of
    requests with probabilistic drafts; `top_k`: the plan's bound.
    """
    processed = process(logits, rows, sampling, rules, stages, top_k)
    picks = pick_tokens(processed, rows, sampling)
    step = torch.arange(rows.drafts.shape[1] + 1, device=picks.device)
    places = rows.offsets[:-1, None] + step.minimum(rows.verify_lengths[:, None])
    tokens = picks[places]
    matches = tokens[:, :-1] == rows.drafts
    if Stage.RATIO in stages:
        assert draft_probabilities is not None, 'this stage needs q'
        tokens, matches = _test_ratios(processed, rows, sampling, draft_probabilities, places, tokens, matches)
    matches &= step[:-1] < rows.verify_lengths[:, None]
    accepted = matches.cumprod(1).sum(1)
    return _cut(tokens, accepted, step, rows.first_positions, sampling, processed)


def _test_ratios(
    processed: Processed,
    rows: LogitRows,
    sampling: Sampling,
    q: Tensor,
    places: Tensor,
    picks: Tensor,
    matches: Tensor,
) -> tuple[Tensor, Tensor]:
    """Tokens and matches where requests with probabilistic drafts are tested by min(1, p / q); the others' as they are.

    A rejected draft is replaced by a draw from what p has beyond q; the row behind the last draft keeps its pick.
    """
    num_requests, num_drafts = rows.drafts.shape
    tested = (sampling.draft_sampling == PROBABILISTIC)[:, None]
    p = processed.scaled().softmax(-1)[places[:, :-1]]
    seeds = sampling.seeds[:, None].expand(-1, num_drafts).flatten()
    positions = (rows.first_positions[:, None] + torch.arange(num_drafts, device=q.device)).flatten()
    chance = uniform(seeds, positions, ACCEPT).view(num_requests, num_drafts)
    at_drafts = rows.drafts[..., None]
    passes = chance * q.gather(-1, at_drafts).squeeze(-1) < p.gather(-1, at_drafts).squeeze(-1)
    rest = (p - q).clamp(min=0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)  # equal laws reject by rounding alone
    noise = gumbel(seeds, positions, p.shape[-1], RESIDUAL).view_as(p)
    drawn = (rest.log() + noise).argmax(-1)
    drawn = torch.where(passes, rows.drafts, drawn)
    has_draft = torch.arange(num_drafts, device=q.device) < rows.verify_lengths[:, None]
    replaced = tested & has_draft & (picks[:, :-1] != NO_PICK)
    tokens = torch.cat([torch.where(replaced, drawn, picks[:, :-1]), picks[:, -1:]], 1)
    return tokens, torch.where(replaced, passes, matches)


def _cut(
    tokens: Tensor, accepted: Tensor, step: Tensor, first: Tensor, sampling: Sampling, processed: Processed
) -> Verdict:
    """End at the first stop id or at the request's limit; at one token the stop wins. `first` [P]: position of token 0.

    Stop ids below the minimum length are banned before the pick, so none needs to be excused here.
    """
    stuck = tokens.gather(1, accepted[:, None]).squeeze(1) == NO_PICK
    emitted = accepted + 1
    num_given = emitted - stuck.long()
    is_stop = (tokens[:, :, None] == sampling.stop_ids[:, None, :]).any(-1)
    is_stop &= step < num_given[:, None]
    before_stop = (is_stop.cumsum(1) == 0).sum(1)
    # a request that ended in a step not read yet may have one more step under way: nothing is left for it to emit
    counts = (before_stop + 1).minimum(num_given).minimum(sampling.end - first).clamp(min=0)
    last = (counts[:, None] - 1).clamp(min=0)
    stopped = is_stop.gather(1, last).squeeze(1)
    full = first + counts >= sampling.end
    finish = torch.where(stuck, STUCK, RUNNING)
    finish = torch.where(stopped, STOPPED, torch.where(full, FULL, finish))
    next_tokens = tokens.gather(1, last).squeeze(1).clamp(min=0)
    return Verdict(tokens, counts, emitted, next_tokens, finish, processed)


def emitted_logprobs(logits: Tensor, ids: Tensor, alternatives: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax of rows [R, V] at `ids` [R], and the `alternatives` best: -> ([R], values [R, n], ids [R, n])."""
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(alternatives, logprobs.shape[1]), -1)
    return logprobs.gather(1, ids[:, None]).squeeze(1), best.values, best.indices
