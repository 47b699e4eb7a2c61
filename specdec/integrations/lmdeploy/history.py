"""What each row of a step must know of its request's past, for penalties and minimum lengths.

LMDeploy prepares a step before it has read the one in front of it, so the history that its host sends is one step old;
what that step emitted is remembered here, on the device. Penalties ask only which ids have occurred, so an id that is
in both does no harm. Rows of a block also see the drafts in front of them.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from lmdeploy.pytorch.engine.logits_process import SamplingInputs
from lmdeploy.pytorch.messages import SchedulerSequence
from lmdeploy.pytorch.strategies.ar_spec.sampling import ARSpecSamplingStrategy
from torch import Tensor

NO_ID = -1


class ExactSamplingStrategy(ARSpecSamplingStrategy):
    """Sampling settings that leave lengths to the device: histories padded with NO_ID, and stop words forbidden only
    where the device counts that it is too early.
    """

    def make_sampling_inputs(self, seqs: Sequence[SchedulerSequence]) -> SamplingInputs:
        inputs = super().make_sampling_inputs(seqs)
        inputs.bad_words, inputs.bad_mask = _id_table([seq.sampling_param.bad_words for seq in seqs])
        if inputs.generated_ids_cpu is not None and not inputs.max_repetition_ngram_size:
            for row, seq in zip(inputs.generated_ids_cpu, seqs):
                row[: len(row) - seq.num_new_tokens] = NO_ID
        return inputs


def _id_table(lists: Sequence[Sequence[int]]) -> tuple[Tensor | None, Tensor | None]:
    """Lists of ids as rows of one tensor, filled with NO_ID, and where ids are; None if there are none."""
    width = max(map(len, lists))
    if not width:
        return None, None
    table = np.full((len(lists), width), NO_ID, dtype=np.int64)
    for row, ids in zip(table, lists):
        row[: len(ids)] = ids
    found = torch.from_numpy(table)
    return found, found >= 0


class RecentTokens:
    """What the last steps emitted, per sequence: enough to bridge what LMDeploy's host has not read yet."""

    STEPS = 2

    def __init__(self) -> None:
        self._steps: deque[tuple[dict[int, int], Tensor]] = deque(maxlen=self.STEPS)

    def note(self, sequences: Sequence[int], tokens: Tensor) -> None:
        """tokens [B, n] of the sequences, NO_ID where fewer were emitted."""
        self._steps.append(({sequence: row for row, sequence in enumerate(sequences)}, tokens))

    def of(self, sequences: Sequence[int], device: torch.device) -> Tensor:
        """Ids [B, m], NO_ID where there is none."""
        found = [torch.empty(len(sequences), 0, dtype=torch.int64, device=device)]
        for rows, tokens in self._steps:
            index = torch.tensor([rows.get(sequence, len(tokens)) for sequence in sequences], device=device)
            nothing = tokens.new_full((1, tokens.shape[1]), NO_ID)
            found.append(torch.cat([tokens, nothing])[index])
        return torch.cat(found, 1)

    def clear(self) -> None:
        self._steps.clear()


def penalised_ids(known: Tensor, recent: Tensor, anchors: Tensor, drafts: Tensor) -> Tensor:
    """Ids that have occurred in front of each row [B * (K + 1), n], repeated where there are fewer.

    known [B, L] from the host, recent [B, m], NO_ID where there is none; anchors [B]; drafts [B, K].
    """
    num_drafts = drafts.shape[1]
    past = torch.cat([known, recent], 1)[:, None].expand(-1, num_drafts + 1, -1)
    step = torch.arange(num_drafts + 1, device=drafts.device)
    ahead = torch.where(step[:-1] < step[:, None], drafts[:, None], NO_ID)
    ids = torch.cat([past, ahead], 2)
    anchor = anchors[:, None, None]
    return torch.cat([torch.where(ids < 0, anchor, ids), anchor.expand(-1, num_drafts + 1, -1)], 2).flatten(0, 1)


def prompt_history(known: Tensor, penalties: Tensor) -> tuple[Tensor, Tensor]:
    """For requests that draw behind a prompt: ids [B, L] without gaps; penalties [B], 1 where nothing was generated.

    known [B, L], filled with NO_ID in front; only a request that was interrupted has generated anything yet.
    """
    if not known.shape[1]:
        return known, penalties
    last = known[:, -1:]
    return torch.where(known < 0, last.clamp(min=0), known), torch.where(last[:, 0] < 0, 1.0, penalties)
