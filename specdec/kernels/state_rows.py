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

    def chunk(self, index: int) -> 'StateRows':
        """One prompt chunk alone; its rows still count from the step's first."""
        last = index + 1
        return StateRows(
            self.slots[index:last],
            self.offsets[index : last + 1],
            self.pending[index:last],
            self.parity[index:last],
            self.fresh[index:last],
            self.chunk_rows[index:last],
        )

    def decodes(self) -> 'StateRows':
        """The requests behind the chunks."""
        first = len(self.chunk_rows)
        return StateRows(
            self.slots[first:], self.offsets[first:], self.pending[first:], self.parity[first:], self.fresh[first:], ()
        )
