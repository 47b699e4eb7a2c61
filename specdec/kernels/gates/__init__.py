"""Gates behind attention, behind a recurrence and in front of a residual stream."""

from torch import Tensor

from specdec.kernels.dispatch import Implementations

_implementation = Implementations(__name__, cuda='triton')


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """silu(gate) * rms_norm(x) per head: x, gate [T, heads * D], weight [D] -> [T, heads * D] in x's dtype.

    `gate` may be columns of something wider. The quotient is rounded and weighted as in kernels.norm, the gate is
    fp32 (https://github.com/huggingface/transformers, Qwen3NextRMSNormGated).
    """
    return _implementation(x.device.type, 'gated_rms_norm')(x, gate, weight, eps)


def sigmoid_gate(x: Tensor, gate: Tensor, residual: Tensor | None = None) -> Tensor:
    """x * sigmoid(gate), plus a residual: x, residual [T, N], gate [T, N] or [T, 1] -> [T, N] in x's dtype.

    `gate` may be columns of something wider.
    """
    return _implementation(x.device.type, 'sigmoid_gate')(x, gate, residual)
