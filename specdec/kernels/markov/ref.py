"""The chain in plain torch, one step a token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.markov import MarkovWeights, Pick


def markov_chain(
    base_logits: Tensor, hidden: Tensor, lead: Tensor | None, anchors: Tensor, weights: MarkovWeights, pick: Pick | None
) -> tuple[Tensor, Tensor]:
    token, tokens, previous = anchors, [], [anchors]
    state = None
    if weights.kind == 'rnn':
        state = hidden.new_zeros(hidden.shape[0], weights.w1.shape[1])
        if lead is not None:
            _, state = step_rnn(weights, state, F.embedding(token, weights.w1), lead)
    for k in range(base_logits.shape[1]):
        feature, state = step_feature(weights, token, hidden[:, k], state)
        logits = base_logits[:, k] + F.linear(feature, weights.w2).float()
        token = logits.argmax(-1) if pick is None else pick(k, logits)
        if weights.d2t is not None:
            token = token + weights.d2t[token]
        tokens.append(token)
        previous.append(token)
    return torch.stack(tokens, 1), torch.stack(previous[:-1], 1)


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
