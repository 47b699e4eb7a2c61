"""One step, whole: build the batch, run the target, judge the drafts, absorb, propose, commit.

Nothing here knows which method drafts, or whether one does: without speculation K is 0 and the proposer has nothing to
absorb. Next: batch.py, then models/, spec_decode/rejection_sampler.py and spec_decode/proposers/, in that order.
"""

from itertools import pairwise

import torch
from torch import Tensor

from specdec.agent.batch import Batch, build_batch
from specdec.agent.caches import Caches
from specdec.agent.state import SlotState
from specdec.models.target import TargetModel, TargetOutput
from specdec.plan import SlotResult, StepPlan, StepResult
from specdec.spec_decode.logits import Stages
from specdec.spec_decode.proposers.base import DraftStep, Proposer
from specdec.spec_decode.rejection_sampler import FULL, RUNNING, STOPPED, Verdict, emitted_logprobs, verify

FINISH = {RUNNING: None, STOPPED: 'stop', FULL: 'length'}


class ModelAgent:
    """Runs plans, one at a time, in order."""

    def __init__(
        self, target: TargetModel, proposer: Proposer, caches: Caches, state: SlotState, page_size: int
    ) -> None:
        self.target, self.proposer, self.caches, self.state = target, proposer, caches, state
        self.page_size = page_size

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        self.state.apply(plan)
        batch = build_batch(plan, self.state, self.page_size)
        output = self.target.forward(batch.rows, self.caches.target)
        if plan.num_absorbing == len(plan.chunks) and not plan.decodes:
            return self._absorb_only(plan, batch, output)
        hidden = output.hidden if batch.logit_rows is None else output.hidden[batch.logit_rows]
        logits = self.target.head(hidden)
        verdict = self._verify(plan, batch, logits)
        self._draft(plan, batch, output, verdict)
        return self._result(plan, batch, logits, verdict)

    def _verify(self, plan: StepPlan, batch: Batch, logits: Tensor) -> Verdict:
        return verify(
            logits,
            batch.logit_requests,
            batch.logit_offsets,
            batch.draw_positions,
            batch.drafts,
            batch.verify_lengths,
            batch.sampling,
            Stages(plan.samples, plan.filters, plan.bans),
        )

    def _draft(self, plan: StepPlan, batch: Batch, output: TargetOutput, verdict: Verdict) -> None:
        """Absorb what is committed, propose the next block if anybody will use it, and move the slots on."""
        layout, absorbing = batch.rows.layout, plan.num_absorbing
        committed = verdict.committed
        if plan.chunks:
            chunk_rows = torch.tensor(layout.chunk_rows, device=committed.device)
            committed = torch.cat([chunk_rows, committed[len(plan.chunks) - absorbing :]])
        lengths = layout.contexts + committed
        step = self._draft_step(batch, output, committed, verdict.next_tokens, lengths[absorbing:], absorbing)
        self.proposer.absorb(step)
        slots, tokens = batch.slots[absorbing:], None
        if plan.num_drafting:
            proposal = self.proposer.propose(step)
            tokens = proposal.tokens
            if proposal.survival is not None:
                self.state.keep_survival(slots, proposal.survival)
        self.state.advance(slots, lengths[absorbing:], verdict.next_tokens, tokens)
        if absorbing:
            self.state.commit(batch.slots[:absorbing], lengths[:absorbing])

    def _absorb_only(self, plan: StepPlan, batch: Batch, output: TargetOutput) -> StepResult:
        """Prompt chunks that all leave their prompt unfinished: nobody draws a token."""
        layout = batch.rows.layout
        committed = torch.tensor(layout.chunk_rows, device=batch.slots.device)
        none = batch.slots[:0]
        self.proposer.absorb(self._draft_step(batch, output, committed, none, none, len(plan.chunks)))
        self.state.commit(batch.slots, layout.contexts + committed)
        return StepResult(plan.step, ())

    def _draft_step(
        self, batch: Batch, output: TargetOutput, committed: Tensor, anchors: Tensor, lengths: Tensor, absorbing: int
    ) -> DraftStep:
        rows = batch.rows
        taps = output.hidden[:, :0] if output.taps is None else output.taps
        return DraftStep(
            taps=taps,
            positions=rows.positions,
            entries=rows.slots,
            row_offsets=rows.layout.row_offsets,
            committed=committed,
            anchors=anchors,
            lengths=lengths,
            page_table=rows.layout.page_table[absorbing:],
            page_size=self.page_size,
            cache=self.caches.draft,
        )

    def _result(self, plan: StepPlan, batch: Batch, logits: Tensor, verdict: Verdict) -> StepResult:
        """Read the step back: one copy for the counts and tokens, one more where logprobs are wanted."""
        columns = [verdict.counts, batch.verify_lengths, verdict.finish]
        table = torch.cat([torch.stack(columns, 1), verdict.tokens], 1).tolist()
        logprobs = None if plan.logprobs is None else self._logprobs(plan.logprobs, batch, logits, verdict)
        slots = [chunk.slot for chunk in plan.chunks[plan.num_absorbing :]] + list(plan.decodes)
        return StepResult(
            plan.step,
            tuple(
                SlotResult(
                    slot=slot,
                    token_ids=tuple(tokens[:count]),
                    drafted=drafted,
                    finish=FINISH[finish],
                    logprobs=None if logprobs is None else logprobs[i][:count],
                )
                for i, (slot, (count, drafted, finish, *tokens)) in enumerate(zip(slots, table))
            ),
        )

    def _logprobs(
        self, alternatives: int, batch: Batch, logits: Tensor, verdict: Verdict
    ) -> list[tuple[dict[int, float], ...]]:
        """Per request, per emitted token: id -> log-probability, the token's own first, then the best alternatives."""
        offsets = batch.logit_offsets
        step = torch.arange(logits.shape[0], device=logits.device) - offsets[batch.logit_requests]
        ids = verdict.tokens[batch.logit_requests, step]
        own, values, best = (x.tolist() for x in emitted_logprobs(logits, ids, alternatives))
        rows = [{token: p} | dict(zip(others, ps)) for token, p, others, ps in zip(ids.tolist(), own, best, values)]
        bounds = offsets.tolist()
        return [tuple(rows[a:b]) for a, b in pairwise(bounds)]
