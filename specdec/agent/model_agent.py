"""One step, whole: build the batch, run the target, judge the drafts, absorb, propose, commit.

Nothing here knows which method drafts, or whether one does: without speculation K is 0 and the proposer has nothing to
absorb. The step falls into two phases that meet at the logits, which is where CUDA graphs are cut (graph_runner.py).
Next: batch.py, then models/, spec_decode/rejection_sampler.py and spec_decode/proposers/, in that order.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from specdec.agent.batch import Batch, decode_batch, mixed_batch
from specdec.agent.caches import Caches
from specdec.agent.graph_runner import GraphRunner
from specdec.agent.state import SlotState
from specdec.agent.transfer import HostCopy, to_device, to_host
from specdec.models.target import TargetModel, TargetOutput
from specdec.plan import SlotResult, StepPlan, StepResult
from specdec.spec_decode.logits import Stages
from specdec.spec_decode.proposers.base import DraftStep, Proposer
from specdec.spec_decode.rejection_sampler import FULL, RUNNING, STOPPED, Verdict, emitted_logprobs, verify

FINISH = {RUNNING: None, STOPPED: 'stop', FULL: 'length'}


@dataclass(frozen=True, slots=True)
class Judged:
    """What a step leaves on the device. `table` [P, 3 + K + 1]: emitted count, verify length, finish code, tokens."""

    batch: Batch
    logits: Tensor
    table: Tensor


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way: (table,) arrives, or (table, offsets, own, values, ids) where logprobs are wanted."""

    plan: StepPlan
    results: HostCopy


class StepModel:
    """The step's two phases as functions of a batch; they read and write the slots' state and the caches."""

    def __init__(
        self, target: TargetModel, proposer: Proposer, caches: Caches, state: SlotState, page_size: int
    ) -> None:
        self.target, self.proposer, self.caches, self.state = target, proposer, caches, state
        self.page_size = page_size

    def run_target(self, batch: Batch) -> tuple[TargetOutput, Tensor]:
        """Rows -> taps and hidden states of all rows, logits [R, V] fp32 of those that draw a token."""
        output = self.target.forward(batch.rows, self.caches.target)
        hidden = output.hidden if batch.logit_rows is None else output.hidden[batch.logit_rows]
        return output, self.target.head(hidden)

    def run_draft(self, batch: Batch, output: TargetOutput, logits: Tensor, stages: Stages, drafting: bool) -> Judged:
        """Logits -> verdict; absorb what is committed, propose the next block if `drafting`, move the slots on."""
        verdict = verify(
            logits,
            batch.logit_requests,
            batch.logit_offsets,
            batch.draw_positions,
            batch.drafts,
            batch.verify_lengths,
            batch.sampling,
            stages,
        )
        layout, absorbing = batch.rows.layout, batch.num_absorbing
        committed = verdict.committed
        if layout.chunk_rows:
            chunk_rows = to_device(layout.chunk_rows, committed.device)
            committed = torch.cat([chunk_rows, committed[len(layout.chunk_rows) - absorbing :]])
        lengths = layout.contexts + committed
        step = self._draft_step(batch, output, committed, verdict.next_tokens, lengths[absorbing:])
        self.proposer.absorb(step)
        slots, tokens = batch.slots[absorbing:], None
        if drafting:
            proposal = self.proposer.propose(step)
            tokens = proposal.tokens
            if proposal.survival is not None:
                self.state.keep_survival(slots, proposal.survival)
        self.state.advance(slots, lengths[absorbing:], verdict.next_tokens, tokens)
        if absorbing:
            self.state.commit(batch.slots[:absorbing], lengths[:absorbing])
        return Judged(batch, logits, _table(batch, verdict))

    def absorb_only(self, batch: Batch) -> None:
        """Prompt chunks that all leave their prompt unfinished: nobody draws a token."""
        output = self.target.forward(batch.rows, self.caches.target)
        layout, nobody = batch.rows.layout, batch.slots[:0]
        committed = to_device(layout.chunk_rows, nobody.device)
        self.proposer.absorb(self._draft_step(batch, output, committed, nobody, nobody))
        self.state.commit(batch.slots, layout.contexts + committed)

    def _draft_step(
        self, batch: Batch, output: TargetOutput, committed: Tensor, anchors: Tensor, lengths: Tensor
    ) -> DraftStep:
        rows = batch.rows
        return DraftStep(
            taps=output.hidden[:, :0] if output.taps is None else output.taps,
            positions=rows.positions,
            entries=rows.slots,
            row_offsets=rows.layout.row_offsets,
            committed=committed,
            anchors=anchors,
            lengths=lengths,
            page_table=rows.layout.page_table[batch.num_absorbing :],
            page_size=self.page_size,
            cache=self.caches.draft,
        )


class ModelAgent:
    """Runs plans in order: `launch` starts a step, `read` waits for its result."""

    def __init__(self, model: StepModel, graphs: GraphRunner | None = None) -> None:
        self.model, self.graphs = model, graphs
        self.device = model.state.device
        self.eager_decode_steps = 0  # steps without prompt chunks that no graph ran

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        self.model.state.apply(plan)
        judged = self._replay(plan) if self.graphs is not None else self._run(plan)
        wanted = () if judged is None else self._wanted(plan, judged)
        return Launched(plan, to_host(wanted, self.device))

    def _replay(self, plan: StepPlan) -> Judged | None:
        assert self.graphs is not None
        judged = self.graphs.run(plan)
        if judged is None:
            self.eager_decode_steps += not plan.chunks
            return self._run(plan)
        return judged

    def _run(self, plan: StepPlan) -> Judged | None:
        """One step, operator by operator; None if no request draws a token."""
        model = self.model
        stages = Stages(plan.samples, plan.filters, plan.bans)
        pad = model.state.padded
        if plan.chunks:
            batch = mixed_batch(model.state, plan, pad, model.page_size, stages)
            if plan.num_absorbing == len(batch.slots):
                model.absorb_only(batch)
                return None
        else:
            slots = to_device(plan.decodes, self.device)
            num_rows = plan.row_bound if pad else None
            batch = decode_batch(model.state, slots, plan.table_width, num_rows, model.page_size, stages)
        output, logits = model.run_target(batch)
        return model.run_draft(batch, output, logits, stages, plan.num_drafting > 0)

    def _wanted(self, plan: StepPlan, judged: Judged) -> tuple[Tensor, ...]:
        if plan.logprobs is None:
            return (judged.table,)
        batch, logits = judged.batch, judged.logits
        step = torch.arange(logits.shape[0], device=logits.device) - batch.logit_offsets[batch.logit_requests]
        tokens = judged.table[:, 3:]
        ids = tokens[batch.logit_requests, step.clamp(max=tokens.shape[1] - 1)]
        return (judged.table, batch.logit_offsets, *emitted_logprobs(logits, ids, plan.logprobs))

    def read(self, launched: Launched) -> StepResult:
        plan, results = launched.plan, launched.results.wait()
        if not results:
            return StepResult(plan.step, ())
        rows = results[0].tolist()
        logprobs = None if plan.logprobs is None else _logprobs(rows, *results[1:])
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
                for i, (slot, (count, drafted, finish, *tokens)) in enumerate(zip(slots, rows))
            ),
        )


def _table(batch: Batch, verdict: Verdict) -> Tensor:
    columns = torch.stack([verdict.counts, batch.verify_lengths, verdict.finish], 1)
    return torch.cat([columns, verdict.tokens], 1)


def _logprobs(
    rows: list[list[int]], offsets: Tensor, own: Tensor, values: Tensor, ids: Tensor
) -> list[tuple[dict[int, float], ...]]:
    """Per request, per emitted token: id -> log-probability, the token's own first, then the best alternatives."""
    tables = own.tolist(), values.tolist(), ids.tolist()
    found = []
    for (count, _, _, *tokens), (first, _) in zip(rows, pairwise(offsets.tolist())):
        steps = zip(tokens[:count], *(table[first : first + count] for table in tables))
        found.append(tuple({token: p} | dict(zip(others, ps)) for token, p, ps, others in steps))
    return found
