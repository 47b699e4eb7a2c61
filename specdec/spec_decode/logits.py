"""From a row's logits to its pick: the one pipeline, with and without speculation, for every verified row.

Order: banned ids, stop ids before the minimum length, temperature, top-k, top-p, min-p, noise, argmax. Without
sampling the argmax comes right after the bans. Next: rejection_sampler.py, which compares picks with drafts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.noise import PICK
from specdec.kernels.pick import argmax, noisy_argmax


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of P requests: seeds, top_k, stop_from, end [P] int64; temperature, top_p, min_p [P] fp32; stop_ids,
    banned_ids [P, n] filled with -1. Temperature 0 is greedy.
    """

    seeds: Tensor
    top_k: Tensor
    stop_from: Tensor
    end: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    stop_ids: Tensor
    banned_ids: Tensor


@dataclass(frozen=True, slots=True)
class Stages:
    """Which stages some request of the batch needs; the host knows, so that no row pays for a stage nobody uses."""

    samples: bool
    filters: bool
    bans: bool


def pick_tokens(logits: Tensor, requests: Tensor, draw_positions: Tensor, sampling: Sampling, stages: Stages) -> Tensor:
    """logits [R, V] fp32, request of each row [R], position of the token it draws [R] -> picks [R] int64."""
    if stages.bans:
        logits = apply_bans(logits, requests, draw_positions, sampling)
    if not stages.samples:
        return argmax(logits)
    temperature, threshold = sampling.temperature[requests], None
    if stages.filters:
        scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
        cuts = sampling.top_k[requests], sampling.top_p[requests], sampling.min_p[requests]
        threshold = filter_threshold(scaled, *cuts)
    return noisy_argmax(logits, temperature, threshold, sampling.seeds[requests], draw_positions, PICK)


def apply_bans(logits: Tensor, requests: Tensor, draw_positions: Tensor, sampling: Sampling) -> Tensor:
    """-inf for banned ids, and for stop ids on rows that draw a token below the minimum length."""
    vocabulary = logits.shape[1]
    early = draw_positions < sampling.stop_from[requests]
    stops = torch.where(early[:, None], sampling.stop_ids[requests], -1)
    ids = torch.cat([sampling.banned_ids[requests], stops], 1)
    padded = torch.cat([logits, logits.new_empty(logits.shape[0], 1)], 1)  # one column more takes the unused entries
    return padded.scatter_(1, torch.where(ids < 0, vocabulary, ids), float('-inf'))[:, :vocabulary]


def filter_threshold(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """What a value must reach to survive top-k, top-p and min-p, each on the renormalised survivors of the one before.

    scaled [R, V] = logits over temperature; top_k [R] (0 = all), top_p and min_p [R]. Each filter keeps what is at
    least as large as its last kept value, so together they are one threshold per row [R] and equal values share a fate.
    """
    vocabulary = scaled.shape[1]
    ranked = scaled.sort(-1, descending=True).values
    last = torch.where(top_k > 0, top_k.clamp(max=vocabulary), vocabulary) - 1
    threshold = ranked.gather(1, last[:, None])
    weights = (ranked - ranked[:, :1]).exp().masked_fill(ranked < threshold, 0)
    before = weights.cumsum(-1) - weights
    inside = before < top_p[:, None] * weights.sum(-1, keepdim=True)
    kept = (inside | (top_p >= 1)[:, None]) & (ranked >= threshold)  # a sum's last bits must not cut a long tail
    kept[:, 0] = True
    threshold = ranked.gather(1, kept.sum(-1, keepdim=True) - 1)
    return threshold.maximum(ranked[:, :1] + min_p.log()[:, None]).squeeze(1)
