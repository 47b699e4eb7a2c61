"""Running plans: records applied, the step launched as graphs or operator by operator, results read when they arrive.

Next: batch.py, which packs a step; step_model.py, the step itself.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from specdec.agent.batch import decode_batch, mixed_batch
from specdec.agent.graph_runner import GraphRunner
from specdec.agent.step_model import Judged, StepModel
from specdec.agent.transfer import HostCopy, to_device, to_host
from specdec.plan import SlotResult, StepPlan, StepResult
from specdec.spec_decode.logits import Stages
from specdec.spec_decode.rejection_sampler import FULL, RUNNING, STOPPED, emitted_logprobs

FINISH = {RUNNING: None, STOPPED: 'stop', FULL: 'length'}


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way: (table,) arrives, or (table, offsets, own, values, ids) where logprobs are wanted."""

    plan: StepPlan
    results: HostCopy


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
