"""The chain in plain torch, one step a token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.filter_threshold import filter_threshold
from specdec.kernels.markov import ChainDraws, MarkovWeights, Pick
from specdec.kernels.noise import Noise
from specdec.kernels.pick.ref import argmax_with, noise_values


def markov_chain(
    base_logits: Tensor,
    hidden: Tensor,
    lead: Tensor | None,
    anchors: Tensor,
    weights: MarkovWeights,
    pick: Pick | None,
    draws: ChainDraws | None,
) -> tuple[Tensor, Tensor]:
    if pick is None:
        pick = _largest if draws is None else _drawing(draws, weights.d2t, *base_logits.shape[1:])
    token, tokens, previous = anchors, [], [anchors]
    state = None
    if weights.kind == 'rnn':
        state = hidden.new_zeros(hidden.shape[0], weights.w1.shape[1])
        if lead is not None:
            _, state = step_rnn(weights, state, F.embedding(token, weights.w1), lead)
    for k in range(base_logits.shape[1]):
        feature, state = step_feature(weights, token, hidden[:, k], state)
        logits = base_logits[:, k] + F.linear(feature, weights.w2).float()
        token = pick(k, logits)
        if weights.d2t is not None:
            token = token + weights.d2t[token]
        tokens.append(token)
        previous.append(token)
    return torch.stack(tokens, 1), torch.stack(previous[:-1], 1)


def _largest(_step: int, logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def _drawing(draws: ChainDraws, d2t: Tensor | None, steps: int, vocabulary: int) -> Pick:
    """Draws with noise that is made for all steps at once: it depends on nothing that they draw."""
    noise, batch = draws.noise, len(draws.temperature)
    ids = None if d2t is None else torch.arange(vocabulary, device=d2t.device) + d2t
    each = torch.arange(batch, device=noise.seeds.device).repeat_interleave(steps)
    positions = noise.positions[:, None] + torch.arange(steps, device=noise.seeds.device)
    streams = None if noise.streams is None else noise.streams[each]
    values = noise_values(Noise(noise.seeds[each], positions.flatten(), streams), ids, vocabulary)
    values = values.view(batch, steps, vocabulary)

    def draw(step: int, logits: Tensor) -> Tensor:
        if draws.kept is not None:
            draws.kept[:, step] = logits
        threshold = None
        if draws.filters is not None:
            threshold = filter_threshold(logits, draws.temperature, draws.filters)
        return argmax_with(values[:, step], logits, draws.temperature, threshold).clamp(min=0)

    return draw


def step_feature(
    weights: MarkovWeights, token: Tensor, hidden: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What w2 projects at one step [B, r], from the token before [B] and the row [B, H]; and the rnn state after it."""
    embedding = F.embedding(token, weights.w1)
    if weights.kind == 'rnn':
        assert state is not None
        return step_rnn(weights, state, embedding, hidden)
    if weights.kind == 'gated':
        gate = F.linear(torch.cat([hidden, embedding], -1), weights.gate, weights.gate_bias)
        return torch.sigmoid(gate) * embedding, None
    return embedding, None


def step_rnn(weights: MarkovWeights, state: Tensor, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """(output feature, next state); the output uses the state before the step."""
    joint = F.linear(torch.cat([state, embedding, hidden], -1), weights.joint, weights.joint_bias)
    gate, candidate, output = joint.chunk(3, -1)
    gate = torch.sigmoid(gate)
    return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)
