"""The gated delta rule over packed rows, its state kept by slot and committed one step late.

Per value head, with S [dk, dv] (https://arxiv.org/abs/2412.06464; transformers, torch_recurrent_gated_delta_rule):

    S <- exp(g) S;    S <- S + k (beta (v - k S))^T;    o = q S / sqrt(dk)
    g = -exp(a_log) softplus(a + dt_bias),  beta = sigmoid(b),  q and k divided by their length

Whether a verify row stays is known a step later. So S ends in front of the step's rows, and their k, v, g and beta stay
beside it, in one of two sets; the next step folds the accepted ones in, one by one and with the same arithmetic, reads
and writes S once, and leaves its own rows in the other set.
"""

from dataclasses import dataclass

from torch import Tensor

from specdec.kernels.dispatch import Implementations
from specdec.kernels.state_rows import StateRows

_implementation = Implementations(__name__, cuda='triton')


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Consecutive value heads share a key head: value head h uses key head h div (value_heads / key_heads)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DeltaState:
    """What slots keep: `state` [S, HV, dk, dv] fp32; two sets of at most M rows, `inputs` [S, 2, M, keys + values] as
    the rule read them (k not yet divided by its length), and `gates` [S, 2, M, 2 HV] fp32: g, then beta.
    """

    state: Tensor
    inputs: Tensor
    gates: Tensor


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """What the gates are made of: `rows` [T, 2 HV], b and then a of each row; a_log, dt_bias [HV] fp32."""

    rows: Tensor
    a_log: Tensor
    dt_bias: Tensor


def gated_delta_rule(qkv: Tensor, gates: DeltaGates, cache: DeltaState, heads: DeltaHeads, rows: StateRows) -> Tensor:
    """qkv [T, 2 keys + values], q, k and v of each row -> o [T, values] in its dtype; rows of no request become 0.

    Prompt chunks are computed 64 rows at a time and leave nothing pending.
    """
    return _implementation(qkv.device.type, 'gated_delta_rule')(qkv, gates, cache, heads, rows)


def fold(cache: DeltaState, heads: DeltaHeads, rows: StateRows) -> None:
    """Bring the slots' states up to their pending rows, which are pending no more; fresh slots become zero."""
    _implementation(cache.state.device.type, 'fold')(cache, heads, rows)
