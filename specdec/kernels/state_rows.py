"""Packed rows as operators with state see them: whose they are, and what of the last step still has to enter it.

State by slot keeps no copy per row. A verify step leaves its rows' small inputs beside the state instead, and the next
step folds in as many as were accepted before it does anything else. Next: gated_delta_rule/ and causal_conv1d/.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateRows:
    """Requests of one step, prompt chunks first. B requests; all tensors int64 but `fresh`.

    `slots` [B]; `offsets` [B + 1]: request r's rows are offsets[r] .. offsets[r + 1]. `pending` [B]: accepted rows that
    are not in the slot's state yet; `parity` [B]: which of the slot's two sets of rows holds them; this step's go to
    the other one, so that programs which share a slot never read what another writes. `fresh` [B] bool: the request
    begins, its state counts as zero. `chunk_rows`: rows of each chunk; they all stay, so nothing of them is pending:
    their state is written out and what is left of their slots' sets lies in set 0.
    """

    slots: Tensor
    offsets: Tensor
    pending: Tensor
    parity: Tensor
    fresh: Tensor
    chunk_rows: tuple[int, ...]

    def chunks(self) -> 'StateRows':
        """The prompt chunks alone."""
        count = len(self.chunk_rows)
        return StateRows(
            self.slots[:count],
            self.offsets[: count + 1],
            self.pending[:count],
            self.parity[:count],
            self.fresh[:count],
            self.chunk_rows,
        )

    def decodes(self) -> 'StateRows':
        """The requests behind the chunks."""
        first = len(self.chunk_rows)
        return StateRows(
            self.slots[first:], self.offsets[first:], self.pending[first:], self.parity[first:], self.fresh[first:], ()
        )
