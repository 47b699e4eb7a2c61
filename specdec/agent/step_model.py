"""One step as two phases that meet at the logits: rows to logits, then verdict, absorb, propose, commit.

Both are functions of a batch over the slots' state and the caches; whether they run operator by operator or are
replayed as CUDA graphs (graph_runner.py) makes no difference to them. Nothing here knows which method drafts, or
whether one does: without speculation K is 0 and the proposer has nothing to absorb. Next: models/, then
spec_decode/rejection_sampler.py and spec_decode/proposers/.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.agent.batch import Batch
from specdec.agent.caches import Caches
from specdec.agent.state import SlotState
from specdec.agent.transfer import to_device
from specdec.models.target import TargetModel, TargetOutput
from specdec.plan import RULES, Stage
from specdec.spec_decode.proposers.base import DraftStep, Proposer
from specdec.spec_decode.proposers.draws import DraftSampling
from specdec.spec_decode.rejection_sampler import Verdict, verify


@dataclass(frozen=True, slots=True)
class Judged:
    """What a step leaves on the device. `table` [P, 3 + K + 1]: emitted count, verify length, finish code, tokens.

    `logits` [R, V]: what log-probabilities are taken from. `survival` [P, K]: of the blocks just drafted, if any.
    """

    batch: Batch
    logits: Tensor
    table: Tensor
    survival: Tensor | None = None


class StepModel:
    """The step's two phases as functions of a batch; they read and write the slots' state and the caches."""

    def __init__(
        self,
        target: TargetModel,
        proposer: Proposer,
        caches: Caches,
        state: SlotState,
        page_size: int,
        processed_logprobs: bool = False,
    ) -> None:
        """`processed_logprobs`: log-probabilities are those that tokens are drawn from, not the target's own."""
        self.target, self.proposer, self.caches, self.state = target, proposer, caches, state
        self.page_size, self.processed_logprobs = page_size, processed_logprobs
        lengths = state.lengths
        self.reports_survival = lengths.reports_survival
        self.keeps_history = lengths.reads_survival and not proposer.has_confidence

    def run_target(self, batch: Batch) -> tuple[TargetOutput, Tensor]:
        """Rows -> taps and hidden states of all rows, logits [R, V] fp32 of those that draw a token."""
        output = self.target.forward(batch.rows, self.caches.target)
        hidden = output.hidden if batch.logit_rows is None else output.hidden[batch.logit_rows]
        return output, self.target.head(hidden)

    def run_draft(
        self, batch: Batch, output: TargetOutput, logits: Tensor, stages: Stage, drafting: bool, top_k: int = 0
    ) -> Judged:
        """Logits -> verdict; absorb what is committed, propose the next block if `drafting`, move the slots on.

        `top_k`: a bound on the requests' own, see kernels.filter_threshold; 0 for none.
        """
        state, drawing = self.state, batch.drawing
        slots = batch.sampling.slots
        q = state.draft_probabilities[slots] if Stage.RATIO in stages else None
        verdict = verify(logits, drawing, batch.sampling, stages, state.rules, q, top_k)
        if self.keeps_history:
            state.history.observe(slots, drawing.verify_lengths, verdict.committed - 1)
        if stages & RULES:
            state.rules.note_emitted(slots, verdict.tokens, verdict.counts, drawing.first_positions, stages)
        layout, absorbing = batch.rows.layout, batch.num_absorbing
        committed = verdict.committed
        if layout.chunk_rows:
            chunk_rows = to_device(layout.chunk_rows, committed.device)
            committed = torch.cat([chunk_rows, committed[len(layout.chunk_rows) - absorbing :]])
        lengths = layout.contexts + committed
        draws = _draft_sampling(batch, stages, top_k) if drafting else None
        step = self._draft_step(batch, output, committed, verdict.next_tokens, lengths[absorbing:], draws)
        self.proposer.absorb(step)
        tokens = survival = None
        if drafting:
            proposal = self.proposer.propose(step)
            tokens = proposal.tokens
            if state.lengths.reads_survival:
                survival = state.history.survival(slots) if proposal.survival is None else proposal.survival
                state.keep_survival(slots, survival)
            if proposal.q is not None:
                state.keep_draft_probabilities(slots, proposal.q)
        state.advance(slots, lengths[absorbing:], verdict.next_tokens, tokens)
        if absorbing:
            state.commit(batch.slots[:absorbing], lengths[:absorbing])
        shown = verdict.processed.scaled() if self.processed_logprobs else logits
        return Judged(batch, shown, _table(batch, verdict), survival)

    def absorb_only(self, batch: Batch) -> None:
        """Prompt chunks that all leave their prompt unfinished: nobody draws a token."""
        output = self.target.forward(batch.rows, self.caches.target)
        layout, nobody = batch.rows.layout, batch.slots[:0]
        committed = to_device(layout.chunk_rows, nobody.device)
        self.proposer.absorb(self._draft_step(batch, output, committed, nobody, nobody))
        self.state.commit(batch.slots, layout.contexts + committed)

    def _draft_step(
        self,
        batch: Batch,
        output: TargetOutput,
        committed: Tensor,
        anchors: Tensor,
        lengths: Tensor,
        sampling: DraftSampling | None = None,
    ) -> DraftStep:
        rows = batch.rows
        return DraftStep(
            taps=output.hidden[:, :0] if output.taps is None else output.taps,
            positions=rows.positions,
            entries=rows.slots,
            row_offsets=rows.layout.row_offsets,
            committed=committed,
            slots=batch.slots,
            anchors=anchors,
            lengths=lengths,
            page_table=rows.layout.page_table[batch.num_absorbing :],
            page_size=self.page_size,
            cache=self.caches.draft,
            sampling=sampling,
        )


def _draft_sampling(batch: Batch, stages: Stage, top_k: int) -> DraftSampling | None:
    if Stage.DRAFT_NOISE not in stages:
        return None
    sampling = batch.sampling
    return DraftSampling(
        kinds=sampling.draft_sampling,
        seeds=sampling.seeds,
        temperature=sampling.temperature,
        filters=sampling.filters(top_k) if Stage.FILTERS in stages else None,
        keeps=Stage.RATIO in stages,
    )


def _table(batch: Batch, verdict: Verdict) -> Tensor:
    columns = torch.stack([verdict.counts, batch.drawing.verify_lengths, verdict.finish], 1)
    return torch.cat([columns, verdict.tokens], 1)
