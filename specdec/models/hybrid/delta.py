"""A gated-delta-rule layer: one projection, a short convolution, the recurrence, a gated norm, one projection."""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.kernels.causal_conv1d import causal_conv1d
from specdec.kernels.gated_delta_rule import DeltaGates, gated_delta_rule
from specdec.kernels.gates import gated_rms_norm
from specdec.kernels.linear import linear_add, norm_linear
from specdec.kernels.state_rows import StateRows
from specdec.layers.norm import RmsNorm
from specdec.layers.recurrent import LayerState
from specdec.layers.weights import Destination, Place, Rearranged
from specdec.models.configs import HybridConfig


class GatedDelta:
    """Memory holds the rows of one product: q, k, v, which are convolved, then z, the outputs' gate, then b and a."""

    def __init__(self, config: HybridConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.heads, self.fused = config.heads, config.fused_inputs
        self.size, self.eps = config.hidden_size, config.decoder.rms_norm_eps
        keys, values, gates = self.heads.keys, self.heads.values, self.heads.value_heads
        self.convolved = 2 * keys + values
        self.parts = (keys, keys, values, values, gates, gates)
        self.input = torch.empty(sum(self.parts), self.size, dtype=dtype, device=device)
        self.conv = torch.empty(self.convolved, config.conv_width, dtype=dtype, device=device)
        self.a_log = torch.empty(gates, dtype=torch.float32, device=device)
        self.dt_bias = torch.empty(gates, dtype=torch.float32, device=device)
        self.norm = RmsNorm(self.heads.value_dim, self.eps, dtype, device)
        self.output = torch.empty(self.size, values, dtype=dtype, device=device)

    def __call__(self, residual: Tensor, norm: RmsNorm, cache: LayerState, rows: StateRows) -> Tensor:
        """residual [T, H] -> [T, H] with the layer's share of norm(residual)."""
        projected = norm_linear(residual, norm.weight, norm.eps, self.input, None)
        heads = self.heads
        mixed, z, gates = projected.split((self.convolved, heads.values, 2 * heads.value_heads), 1)
        qkv = causal_conv1d(mixed, self.conv, cache.windows, rows)
        read = gated_delta_rule(qkv, DeltaGates(gates, self.a_log, self.dt_bias), cache.delta, heads, rows)
        gated = gated_rms_norm(read, z, self.norm.weight, self.norm.eps)
        return linear_add(gated, self.output, None, residual)

    def weights(self, name: str) -> dict[str, Place]:
        q, k, v, z, b, a = self.input.split(self.parts)
        found: dict[str, Place] = {
            f'{name}.conv1d.weight': Destination(self.conv[:, None], (self.convolved, 1, self.conv.shape[1])),
            f'{name}.A_log': Destination(self.a_log, tuple(self.a_log.shape)),
            f'{name}.dt_bias': Destination(self.dt_bias, tuple(self.dt_bias.shape)),
            f'{name}.out_proj.weight': Destination(self.output, tuple(self.output.shape)),
            **self.norm.weights(f'{name}.norm'),
        }
        if self.fused:
            found[f'{name}.in_proj_qkvz.weight'] = self._interleaved(q, k, v, z)
            found[f'{name}.in_proj_ba.weight'] = self._interleaved(b, a)
            return found
        split = {'qkv': self.input[: self.convolved], 'z': z, 'b': b, 'a': a}
        return found | {f'{name}.in_proj_{part}.weight': Destination(x, tuple(x.shape)) for part, x in split.items()}

    def _interleaved(self, *parts: Tensor) -> Rearranged:
        """A tensor that holds, key head by key head, that head's rows of each part."""
        rows = sum(len(part) for part in parts)
        return Rearranged((rows, self.size), _by_groups(self.heads.key_heads, parts))


def _by_groups(groups: int, parts: tuple[Tensor, ...]) -> Callable[[Tensor], None]:
    counts = [len(part) // groups for part in parts]

    def place(tensor: Tensor) -> None:
        for part, rows in zip(parts, tensor.unflatten(0, (groups, -1)).split(counts, 1)):
            part.copy_(rows.flatten(0, 1))

    return place
