"""DSpark's sequential head: base logits plus a low-rank bias that depends on the token before, left to right.

Formulas: docs/drafts.md, after the DSpark paper (section on the sequential head) and its released implementation.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from specdec.kernels.dispatch import Implementations
from specdec.kernels.filter_threshold import Filters
from specdec.kernels.noise import Noise

_implementation = Implementations(__name__, cuda='triton')


@dataclass(frozen=True, slots=True)
class MarkovWeights:
    """w1 [V, r] embeds the previous token (target ids), w2 [Vd, r] projects to the bias.

    gated: gate [r, H + r], gate_bias [r] act on (hidden, embedding). rnn: joint [3 r, 2 r + H], joint_bias [3 r] act on
    (state, embedding, hidden) and give gate, candidate and output. d2t [Vd]: offsets from draft ids to target ids.
    """

    w1: Tensor
    w2: Tensor
    kind: str
    gate: Tensor | None = None
    gate_bias: Tensor | None = None
    joint: Tensor | None = None
    joint_bias: Tensor | None = None
    d2t: Tensor | None = None


Pick = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ChainDraws:
    """Tokens drawn with noise: temperature [B] fp32, 0 for the largest logit; `noise`: keys of each request's first
    token, the k-th behind it being at that position + k; ids in keys are the target's. `filters` of the B act on each
    token's logits over temperature. `kept` [B, K, Vd] fp32 gets the logits.
    """

    temperature: Tensor
    noise: Noise
    filters: Filters | None = None
    kept: Tensor | None = None


def markov_chain(
    base_logits: Tensor,
    hidden: Tensor,
    lead: Tensor | None,
    anchors: Tensor,
    weights: MarkovWeights,
    pick: Pick | None = None,
    draws: ChainDraws | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw K tokens left to right -> (tokens [B, K] target ids, previous [B, K]: the token before each).

    base_logits [B, K, Vd] fp32; hidden [B, K, H], the rows they came from; anchors [B]. `lead` [B, H]: the row before
    the first proposal, through which an rnn state steps in fill-in drafts. `pick(k, logits [B, Vd])` chooses draft ids;
    without, `draws` says how they are drawn; without that either, the largest logit wins, the lower id if equal.
    """
    chain = _implementation(base_logits.device.type, 'markov_chain')
    return chain(base_logits, hidden, lead, anchors, weights, pick, draws)
