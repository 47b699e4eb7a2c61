"""From a row's logits to its pick: the one pipeline, with and without speculation, for every verified row.

Order: logit bias; bad words, minimum length, allowed ids; repetition, presence and frequency penalty; grammar, thinking
budget; temperature, top-k, top-p, min-p; noise, argmax. What rules an id out commutes with what moves its logit, so the
rules before temperature run as two operations. Next: rejection_sampler.py, which compares picks with drafts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.filter_threshold import Filters, cut, divided, filter_threshold
from specdec.kernels.logit_rules import RuleRows, apply_rules
from specdec.kernels.noise import Noise
from specdec.kernels.pick import argmax, noisy_argmax
from specdec.plan import RULES, Stage
from specdec.spec_decode.rules import NO_ID, Rules

ID_RULES = Stage.BANS | Stage.WORDS
DENSE_RULES = Stage.BIAS | Stage.PENALTIES | Stage.MASKS | Stage.THINKING


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of P requests: slots, seeds, top_k, stop_from, end [P] int64; temperature, top_p, min_p [P] fp32;
    stop_ids, banned_ids [P, n] filled with -1. Temperature 0 is greedy. `draft_sampling` [P]: GREEDY, COUPLED or
    PROBABILISTIC.
    """

    slots: Tensor
    seeds: Tensor
    top_k: Tensor
    stop_from: Tensor
    end: Tensor
    draft_sampling: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    stop_ids: Tensor
    banned_ids: Tensor

    def filters(self, top_k: int) -> Filters:
        """`top_k`: the plan's bound."""
        return Filters(self.top_k, self.top_p, self.min_p, top_k)


GREEDY, COUPLED, PROBABILISTIC = range(3)


@dataclass(frozen=True, slots=True)
class LogitRows:
    """R rows with logits, of P requests. requests [R]: which of the P; offsets [P + 1]: each one's rows;
    draw_positions [R]: position of the token that the row draws; drafts [P, K], of which verify_lengths [P] have rows.
    """

    requests: Tensor
    offsets: Tensor
    draw_positions: Tensor
    drafts: Tensor
    verify_lengths: Tensor

    @property
    def steps(self) -> Tensor:
        """How many drafts of the block are in front of each row [R]; rows of nobody get any valid number."""
        row = torch.arange(self.requests.shape[0], device=self.requests.device)
        return (row - self.offsets[self.requests]).clamp(0, self.drafts.shape[1])

    @property
    def first_positions(self) -> Tensor:
        """Where each request's first row draws [P]."""
        return self.draw_positions[self.offsets[:-1]]


@dataclass(frozen=True, slots=True)
class Processed:
    """Logits [R, V] after every rule; the rows' temperatures [R] and thresholds [R], None where nobody needs them."""

    logits: Tensor
    temperature: Tensor | None
    threshold: Tensor | None

    def scaled(self) -> Tensor:
        """Unnormalised log-probabilities of what a row's token is drawn from [R, V]; of greedy rows the logits."""
        if self.temperature is None:
            return self.logits
        scaled = divided(self.logits, self.temperature)
        return scaled if self.threshold is None else cut(scaled, self.threshold)


def process(
    logits: Tensor, rows: LogitRows, sampling: Sampling, rules: Rules | None, stages: Stage, top_k: int = 0
) -> Processed:
    """logits [R, V] fp32, left as they are. `top_k`: the plan's bound on everybody's, 0 for none."""
    if stages & RULES:
        logits = _with_rules(logits, rows, sampling, rules, stages)
    if Stage.NOISE not in stages:
        return Processed(logits, None, None)
    temperature, threshold = sampling.temperature[rows.requests], None
    if Stage.FILTERS in stages:
        threshold = filter_threshold(logits, temperature, sampling.filters(top_k)[rows.requests])
    return Processed(logits, temperature, threshold)


def pick_tokens(processed: Processed, rows: LogitRows, sampling: Sampling) -> Tensor:
    """The pick of each row [R] int64; NO_PICK where the rules left no id."""
    if processed.temperature is None:
        return argmax(processed.logits)
    noise = Noise(sampling.seeds[rows.requests], rows.draw_positions)
    return noisy_argmax(processed.logits, processed.temperature, processed.threshold, noise)


def _with_rules(logits: Tensor, rows: LogitRows, sampling: Sampling, rules: Rules | None, stages: Stage) -> Tensor:
    if stages & DENSE_RULES:
        logits = _dense_rules(logits, rows, sampling, rules, stages)
    elif stages & ID_RULES:
        logits = logits.clone()
    if stages & ID_RULES:
        ids = _banned_ids(rows, sampling, rules, stages)
        logits.scatter_add_(1, ids.clamp(min=0), torch.where(ids < 0, 0.0, float('-inf')))
    return logits


def _dense_rules(logits: Tensor, rows: LogitRows, sampling: Sampling, rules: Rules | None, stages: Stage) -> Tensor:
    assert rules is not None, 'these stages need tables'
    whose = RuleRows(rows.requests, rows.steps, sampling.slots, rows.drafts)
    forced = None
    if Stage.THINKING in stages:
        forced = rules.forced_ids(whose.slots, whose.drafts, whose.requests, whose.steps, rows.draw_positions)
    return apply_rules(
        logits,
        whose,
        rules.tables,
        bias=Stage.BIAS in stages,
        penalties=Stage.PENALTIES in stages,
        masks=Stage.MASKS in stages,
        forced=forced,
    )


def _banned_ids(rows: LogitRows, sampling: Sampling, rules: Rules | None, stages: Stage) -> Tensor:
    """Ids ruled out on each row [R, n]: banned ones, stop ids below the minimum length, ends of bad words."""
    found = []
    if Stage.BANS in stages:
        early = rows.draw_positions < sampling.stop_from[rows.requests]
        found.append(sampling.banned_ids[rows.requests])
        found.append(torch.where(early[:, None], sampling.stop_ids[rows.requests], NO_ID))
    if Stage.WORDS in stages:
        assert rules is not None, 'this stage needs tables'
        found.append(rules.word_bans(sampling.slots, rows.drafts, rows.requests, rows.steps))
    return torch.cat(found, 1)
