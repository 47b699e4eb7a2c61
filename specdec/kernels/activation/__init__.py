"""The gate of a SwiGLU MLP."""

from torch import Tensor

from specdec.kernels.dispatch import Implementations

_implementation = Implementations(__name__)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2 I] = (gate, up) -> [..., I]."""
    return _implementation(gate_up.device.type, 'silu_mul')(gate_up)
