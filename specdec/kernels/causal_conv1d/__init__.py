"""Depthwise causal convolution over each request's own rows, with SiLU behind it and a window of rows kept by slot."""

from torch import Tensor

from specdec.kernels.dispatch import Implementations
from specdec.kernels.state_rows import StateRows

_implementation = Implementations(__name__, cuda='triton')


def causal_conv1d(x: Tensor, weight: Tensor, windows: Tensor, rows: StateRows) -> Tensor:
    """silu(sum_j weight[c, j] x[t - W + 1 + j, c]) -> [T, C] in x's dtype; rows of no request become 0.

    x [T, C] may be columns of something wider; weight [C, W]. windows [S, 2, W - 1 + M, C]: a slot's two sets, each the
    W - 1 rows before the last step's and those rows themselves, at most M of them; written for this step. Sums are fp32
    (in fp64 for fp64 rows). A fresh request has zeros in front.
    """
    return _implementation(x.device.type, 'causal_conv1d')(x, weight, windows, rows)
