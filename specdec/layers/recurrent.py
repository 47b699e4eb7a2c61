"""The recurrent kind of cache: per slot one state, as large for long requests as for short ones, which rejected rows
never enter.

Where a state stands is a length. What is pending of a slot is then the difference between the committed length that a
step begins with and that, so no verdict has to tell the cache anything, and a slot may sit out any number of steps.
Next: kernels/state_rows.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.gated_delta_rule import DeltaHeads, DeltaState, fold
from specdec.kernels.paged_attention import RowLayout
from specdec.kernels.state_rows import StateRows
from specdec.layers.cache_specs import CacheRoom, PagedCache, PagedSpec

STATE_DTYPE = torch.float32


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """States of `num_layers` gated-delta-rule layers whose convolution sees `conv_width` rows; verify steps have at
    most `num_rows` (K + 1) rows, which are kept in `dtype`.
    """

    num_layers: int
    heads: DeltaHeads
    conv_width: int
    num_rows: int
    dtype: torch.dtype

    @property
    def channels(self) -> int:
        return 2 * self.heads.keys + self.heads.values

    @property
    def bytes_per_state(self) -> int:
        """State and the rows that the convolution looks back at: what a copy holds."""
        heads = self.heads
        state = heads.value_heads * heads.key_dim * heads.value_dim * STATE_DTYPE.itemsize
        return self.num_layers * (state + (self.conv_width - 1) * self.channels * self.dtype.itemsize)

    @property
    def bytes_per_slot(self) -> int:
        """State, two sets of pending rows with their gates, two windows of the convolution; length and parity."""
        heads, rows = self.heads, self.num_rows
        state = heads.value_heads * heads.key_dim * heads.value_dim * STATE_DTYPE.itemsize
        pending = 2 * rows * (heads.keys + heads.values) * self.dtype.itemsize
        gates = 2 * rows * 2 * heads.value_heads * STATE_DTYPE.itemsize
        windows = 2 * (self.conv_width - 1 + rows) * self.channels * self.dtype.itemsize
        return self.num_layers * (state + pending + gates + windows) + 2 * torch.int64.itemsize

    def allocate(self, room: CacheRoom, device: torch.device) -> 'RecurrentCache':
        """Zeros; what an earlier request left in a slot is never read by the next one."""
        heads, slots, rows = self.heads, room.num_slots, self.num_rows
        states, kept = room.num_states + 1, self.conv_width - 1

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        shape = (heads.value_heads, heads.key_dim, heads.value_dim)
        layers = tuple(
            LayerState(
                DeltaState(
                    zeros(slots, *shape, dtype=STATE_DTYPE),
                    zeros(slots, 2, rows, heads.keys + heads.values, dtype=self.dtype),
                    zeros(slots, 2, rows, 2 * heads.value_heads, dtype=STATE_DTYPE),
                ),
                zeros(slots, 2, kept + rows, self.channels, dtype=self.dtype),
                zeros(states, *shape, dtype=STATE_DTYPE),
                zeros(states, kept, self.channels, dtype=self.dtype),
            )
            for _ in range(self.num_layers)
        )
        return RecurrentCache(heads, layers, zeros(slots, dtype=torch.int64), zeros(slots, dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer: `delta` and the convolution's `windows` [S, 2, W - 1 + M, C] by slot; copies of states and of the
    W - 1 rows before them, [N + 1, HV, dk, dv] and [N + 1, W - 1, C].
    """

    delta: DeltaState
    windows: Tensor
    saved_states: Tensor
    saved_windows: Tensor


@dataclass(frozen=True, slots=True)
class RecurrentCache:
    """`lengths` [S]: tokens that a slot's state has seen; `parity` [S]: which set holds the rows behind them."""

    heads: DeltaHeads
    layers: tuple[LayerState, ...]
    lengths: Tensor
    parity: Tensor

    @property
    def num_rows(self) -> int:
        return self.layers[0].delta.inputs.shape[2]

    def rows(self, slots: Tensor, layout: RowLayout) -> StateRows:
        """How a step's requests [B] find their slots' states: what was accepted since then is to be folded in."""
        pending = (layout.contexts - self.lengths[slots]).clamp(0, self.num_rows)
        fresh = layout.contexts == 0
        return StateRows(slots, layout.row_offsets, pending, self.parity[slots], fresh, layout.chunk_rows)

    def advance(self, rows: StateRows, layout: RowLayout) -> None:
        """Behind a step, once for all layers: states have seen what was committed before it, and all chunk rows."""
        chunks = len(rows.chunk_rows)
        seen = (rows.offsets[1:] - rows.offsets[:-1])[:chunks]
        lengths = torch.cat([layout.contexts[:chunks] + seen, layout.contexts[chunks:]])
        parity = torch.cat([torch.zeros_like(seen), 1 - rows.parity[chunks:]])
        self.lengths.index_copy_(0, rows.slots, lengths)
        self.parity.index_copy_(0, rows.slots, parity)

    def fold(self, slots: Tensor, counts: Tensor) -> None:
        """Let the first counts [B] pending rows of slots [B] enter their states; the others are forgotten."""
        parity, nothing = self.parity[slots], torch.zeros(len(slots) + 1, dtype=torch.int64, device=slots.device)
        fresh = torch.zeros_like(slots, dtype=torch.bool)
        rows = StateRows(slots, nothing, counts, parity, fresh, ())
        for layer in self.layers:
            fold(layer.delta, self.heads, rows)
            kept = layer.saved_windows.shape[1]
            places = counts[:, None] + torch.arange(kept, device=slots.device)
            layer.windows[slots, parity, :kept] = layer.windows[slots[:, None], parity[:, None], places]
        self.lengths.index_add_(0, slots, counts)

    def save(self, slot: int, state: int) -> None:
        """A chunk has just ended, so nothing is pending and set 0 holds the rows before the next one."""
        for layer in self.layers:
            layer.saved_states[state].copy_(layer.delta.state[slot])
            layer.saved_windows[state].copy_(layer.windows[slot, 0, : layer.saved_windows.shape[1]])

    def restore(self, state: int, slot: int, length: int) -> None:
        for layer in self.layers:
            layer.delta.state[slot].copy_(layer.saved_states[state])
            layer.windows[slot, 0, : layer.saved_windows.shape[1]].copy_(layer.saved_windows[state])
        self.lengths[slot] = length
        self.parity[slot] = 0


@dataclass(frozen=True, slots=True)
class HybridSpec:
    """Pages for the layers that attend, states by slot for those that recur."""

    pages: PagedSpec
    states: RecurrentSpec

    @property
    def name(self) -> str:
        return self.pages.name

    @property
    def dtype(self) -> torch.dtype:
        return self.pages.dtype

    @property
    def bytes_per_token(self) -> float:
        return self.pages.bytes_per_token

    @property
    def bytes_per_slot(self) -> int:
        return self.states.bytes_per_slot

    @property
    def bytes_per_state(self) -> int:
        return self.states.bytes_per_state

    def allocate(self, room: CacheRoom, device: torch.device) -> 'HybridCache':
        return HybridCache(self.pages.allocate(room, device), self.states.allocate(room, device))


@dataclass(frozen=True, slots=True)
class HybridCache:
    pages: PagedCache
    states: RecurrentCache

    def save(self, slot: int, state: int, _length: int) -> None:
        self.states.save(slot, state)

    def restore(self, state: int, slot: int, length: int) -> None:
        self.states.restore(state, slot, length)
