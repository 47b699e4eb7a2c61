"""Running plans: records applied, the step launched as graphs or operator by operator, results read when they arrive.

Next: batch.py, which packs a step; step_model.py, the step itself; grammar_masks.py, what happens between its phases.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from specdec.agent.batch import decode_batch, mixed_batch
from specdec.agent.grammar_masks import GrammarMasks, MakeGuide
from specdec.agent.graph_runner import GraphRunner
from specdec.agent.marks import Mark, mark, milliseconds
from specdec.agent.step_cost import StepCost
from specdec.agent.step_model import Judged, StepModel
from specdec.agent.transfer import HostCopy, to_device, to_host
from specdec.plan import SlotResult, StepPlan, StepResult
from specdec.spec_decode.rejection_sampler import FULL, RUNNING, STOPPED, STUCK, emitted_logprobs

FINISH = {RUNNING: None, STOPPED: 'stop', FULL: 'length', STUCK: 'error'}


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way: (table,) arrives, or (table, offsets, own, values, ids) where logprobs are wanted.

    The table is that of Judged; in a step with grammars the next drafts [P, K] stand behind it. Survivals [P, K], if
    the host wants them, come last.
    """

    plan: StepPlan
    results: HostCopy
    marks: Sequence[Mark] | None = None  # before the step, at the logits, behind it; where costs are kept


class ModelAgent:
    """Runs plans in order: `launch` starts a step, `read` waits for its result."""

    def __init__(
        self,
        model: StepModel,
        make_guide: MakeGuide,
        graphs: GraphRunner | None = None,
        cost: StepCost | None = None,
        followers: Sequence[Callable[[StepPlan], None]] = (),
    ) -> None:
        """`make_guide`: what walks a request's grammar; called for those that have one. `cost`: learns from every
        decode step, if somebody will ask it. `followers` are told of every plan before it runs: other ranks.
        """
        self._followers = tuple(followers)
        self.model, self.graphs, self.cost = model, graphs, cost
        self.device = model.state.device
        self.grammar_masks = GrammarMasks(model.state, make_guide)
        self.eager_decode_steps = 0  # steps without prompt chunks that no graph ran

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        for tell in self._followers:
            tell(plan)
        self.model.state.apply(plan)
        self.model.caches.restore(plan)
        self.grammar_masks.admit(plan.admits)
        marks = None if self.cost is None or plan.chunks else [mark(self.device)]
        between = partial(self._between, plan, marks)
        judged = None if self.graphs is None else self.graphs.run(plan, between)
        if judged is None:
            self.eager_decode_steps += self.graphs is not None and not plan.chunks
            judged = self._run(plan, between)
        if marks is not None:
            marks.append(mark(self.device))
        self.model.caches.save(plan)
        launched = Launched(plan, to_host(() if judged is None else self._wanted(plan, judged), self.device), marks)
        if plan.grammars:
            self.grammar_masks.note_launched(plan, launched.results)
        return launched

    def _between(self, plan: StepPlan, marks: list[Mark] | None) -> None:
        """What happens when a step's target is under way and its verdict is not."""
        if marks is not None:
            marks.append(mark(self.device))
        self.grammar_masks.write(plan.grammars)

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
        reported = (judged.survival,) if judged.survival is not None and self.model.reports_survival else ()
        if plan.logprobs is None:
            return (wanted, *reported)
        rows, logits = judged.batch.drawing, judged.logits
        ids = judged.table[:, 3:][rows.requests, rows.steps].clamp(min=0)
        return (wanted, rows.offsets, *emitted_logprobs(logits, ids, plan.logprobs), *reported)

    def read(self, launched: Launched) -> StepResult:
        plan, results = launched.plan, launched.results.wait()
        if not results:
            return StepResult(plan.step, ())
        rows = results[0].tolist()
        logprobs = None if plan.logprobs is None else _logprobs(rows, *results[1:5])
        reported = len(results) > (1 if plan.logprobs is None else 5)
        survivals = results[-1].tolist() if reported else [None] * len(rows)
        if launched.marks is not None:
            self._note_cost(launched.marks, plan, sum(drafted for _, drafted, *_ in rows[: len(plan.decodes)]))
        return StepResult(
            plan.step,
            tuple(
                SlotResult(
                    slot=slot,
                    token_ids=tuple(tokens[:count]),
                    drafted=drafted,
                    finish=FINISH[finish],
                    logprobs=None if logprobs is None else logprobs[i][:count],
                    survival=None if survivals[i] is None else tuple(survivals[i]),
                )
                for i, (slot, (count, drafted, finish, *tokens)) in enumerate(zip(plan.drawing_slots, rows))
            ),
        )

    def _note_cost(self, marks: Sequence[Mark], plan: StepPlan, num_drafted: int) -> None:
        """Where rows are padded the host's bound sized the step, else what was really verified."""
        assert self.cost is not None
        batch = len(plan.decodes)
        rows = plan.row_bound if self.model.state.padded else batch + num_drafted
        target, rest = milliseconds(marks[0], marks[1]), milliseconds(marks[1], marks[2])
        self.cost.observe(batch, rows, target, rest, plan.num_drafting > 0)


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
