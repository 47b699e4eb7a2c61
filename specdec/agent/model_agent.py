"""Running plans: records applied, the step launched as graphs or operator by operator, results read when they arrive.

Next: batch.py, which packs a step; step_model.py, the step itself; grammar_masks.py, what happens between its phases.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from specdec.agent.batch import decode_batch, mixed_batch
from specdec.agent.grammar_masks import GrammarMasks, MakeGuide
from specdec.agent.graph_runner import GraphRunner
from specdec.agent.step_model import Judged, StepModel
from specdec.agent.transfer import HostCopy, to_device, to_host
from specdec.plan import SlotResult, StepPlan, StepResult
from specdec.spec_decode.rejection_sampler import FULL, RUNNING, STOPPED, STUCK, emitted_logprobs

FINISH = {RUNNING: None, STOPPED: 'stop', FULL: 'length', STUCK: 'error'}


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way: (table,) arrives, or (table, offsets, own, values, ids) where logprobs are wanted.

    The table is that of Judged; in a step with grammars the next drafts [P, K] stand behind it.
    """

    plan: StepPlan
    results: HostCopy


class ModelAgent:
    """Runs plans in order: `launch` starts a step, `read` waits for its result."""

    def __init__(self, model: StepModel, make_guide: MakeGuide, graphs: GraphRunner | None = None) -> None:
        """`make_guide`: what walks a request's grammar; called for those that have one."""
        self.model, self.graphs = model, graphs
        self.device = model.state.device
        self.grammar_masks = GrammarMasks(model.state, make_guide)
        self.eager_decode_steps = 0  # steps without prompt chunks that no graph ran

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        self.model.state.apply(plan)
        self.model.caches.restore(plan)
        self.grammar_masks.admit(plan.admits)
        write_masks = partial(self.grammar_masks.write, plan.grammars)
        judged = None if self.graphs is None else self.graphs.run(plan, write_masks)
        if judged is None:
            self.eager_decode_steps += self.graphs is not None and not plan.chunks
            judged = self._run(plan, write_masks)
        self.model.caches.save(plan)
        launched = Launched(plan, to_host(() if judged is None else self._wanted(plan, judged), self.device))
        if plan.grammars:
            self.grammar_masks.note_launched(plan, launched.results)
        return launched

    def _run(self, plan: StepPlan, between: Callable[[], None]) -> Judged | None:
        """One step, operator by operator; None if no request draws a token. `between` is called between its phases."""
        model, stages, pad = self.model, plan.stages, self.model.state.padded
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
        between()
        return model.run_draft(batch, output, logits, stages, plan.num_drafting > 0, plan.top_k)

    def _wanted(self, plan: StepPlan, judged: Judged) -> tuple[Tensor, ...]:
        wanted = judged.table
        if plan.grammars:  # the drafts, too: their masks are written before the step that verifies them is judged
            wanted = torch.cat([wanted, self.model.state.drafts[judged.batch.sampling.slots]], 1)
        if plan.logprobs is None:
            return (wanted,)
        rows, logits = judged.batch.drawing, judged.logits
        ids = judged.table[:, 3:][rows.requests, rows.steps].clamp(min=0)
        return (wanted, rows.offsets, *emitted_logprobs(logits, ids, plan.logprobs))

    def read(self, launched: Launched) -> StepResult:
        plan, results = launched.plan, launched.results.wait()
        if not results:
            return StepResult(plan.step, ())
        rows = results[0].tolist()
        logprobs = None if plan.logprobs is None else _logprobs(rows, *results[1:])
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
                for i, (slot, (count, drafted, finish, *tokens)) in enumerate(zip(plan.drawing_slots, rows))
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
