"""CUDA graphs of a decode step, captured at start-up: one up to the logits, one from there on, replayed back to back.

A graph is picked by batch bucket, rows bucket and variant; a smaller step is padded with slot 0, whose rows touch the
scratch page only. All graphs share one memory pool, so the largest sets its size. Next: step_model.py, whose two
phases are what is captured.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.agent.batch import decode_batch
from specdec.agent.marks import mark, milliseconds
from specdec.agent.step_model import Judged, StepModel
from specdec.agent.transfer import to_device
from specdec.plan import NO_STAGE, RULES, Stage, StepPlan
from specdec.spec_decode.draft_budget import row_buckets

CaptureProgress = Callable[[int, int], None]  # graphs captured, graphs in all

GREEDY = NO_STAGE
SAMPLED = Stage.NOISE | Stage.DRAFT_NOISE | Stage.BANS
FULL = SAMPLED | Stage.FILTERS | RULES


def batch_buckets(max_batch_size: int) -> tuple[int, ...]:
    """Batch sizes that have graphs: powers of two up to 16, then steps of 8, 16, 32 and 64, and the maximum itself."""
    steps = [1, 2, 4, 8, 16, *range(24, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 1025, 64)]
    return (*(size for size in steps if size < max_batch_size), max_batch_size)


def bucket_for(size: int, buckets: Iterable[int]) -> int | None:
    """The smallest bucket that holds `size`, or None."""
    return next((bucket for bucket in buckets if bucket >= size), None)


@dataclass(frozen=True, slots=True)
class DraftGraph:
    graph: torch.cuda.CUDAGraph
    judged: Judged


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """Graphs of a (batch, rows) bucket: the target's, the draft's by (variant, drafting); `slots` [B] is the input."""

    slots: Tensor
    target: torch.cuda.CUDAGraph
    drafts: dict[tuple[Stage, bool], DraftGraph]


class GraphRunner:
    """Captures and replays. `sizes`: batch sizes to capture, None for `batch_buckets`; larger batches run eagerly.

    `table_width`: page-table columns of every graph, wide enough for session_len.
    """

    def __init__(self, model: StepModel, max_batch_size: int, sizes: Sequence[int] | None = None) -> None:
        self.model, self.table_width = model, model.state.page_table.shape[1]
        self.buckets = tuple(sorted(set(sizes))) if sizes else batch_buckets(max_batch_size)
        self.graphs: dict[tuple[int, int], StepGraphs] = {}
        self.replays = 0
        probabilistic = len(model.state.draft_probabilities) > 0
        self.stages = (GREEDY, SAMPLED, FULL | Stage.RATIO if probabilistic else FULL)

    def capture(self, progress: CaptureProgress | None = None) -> None:
        """Capture every bucket, the largest first so that the others fit into its memory."""
        keys = self.shapes()
        pool = torch.cuda.graph_pool_handle()
        for done, (batch, rows) in enumerate(keys):
            self.graphs[batch, rows] = self._capture_bucket(batch, rows, pool)
            if progress is not None:
                progress(done + 1, len(keys))
        torch.cuda.synchronize()

    def shapes(self) -> list[tuple[int, int]]:
        """What is captured, (batch, rows), the largest first."""
        return sorted(((batch, rows) for batch in self.buckets for rows in self.rows_for(batch)), reverse=True)

    def rows_for(self, batch: int) -> tuple[int, ...]:
        """Row counts of a batch bucket: with every draft verified or none, and between them where lengths adapt."""
        most = self.model.state.num_drafts + 1
        if self.model.state.lengths.reports_survival:
            return row_buckets(batch, most - 1)
        return tuple(sorted({batch, batch * most}))

    def _variants(self, batch: int, rows: int) -> list[tuple[Stage, bool]]:
        may_draft = self.model.state.num_drafts > 0
        draws = [(stages, may_draft) for stages in self.stages]
        may_pause = may_draft and (rows == batch or self.model.state.lengths.reports_survival)
        return draws + ([(stages, False) for stages, _ in draws] if may_pause else [])

    @torch.inference_mode()
    def _capture_bucket(self, batch: int, rows: int, pool: tuple[int, int]) -> StepGraphs:
        model, state = self.model, self.model.state
        slots = torch.zeros(batch, dtype=torch.int64, device=state.device)

        def target_phase():
            prepared = decode_batch(state, slots, self.table_width, rows, model.page_size, self.stages[-1])
            return (prepared, *model.run_target(prepared))

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles kernels and sizes workspaces before anything is recorded
            warm = target_phase()
            for stages, drafting in self._variants(batch, rows):
                model.run_draft(*warm, stages, drafting)
        torch.cuda.current_stream().wait_stream(stream)
        target = torch.cuda.CUDAGraph()
        with torch.cuda.graph(target, pool=pool):
            prepared, output, logits = target_phase()
        drafts = {}
        for stages, drafting in self._variants(batch, rows):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                judged = model.run_draft(prepared, output, logits, stages, drafting)
            drafts[stages, drafting] = DraftGraph(graph, judged)
        return StepGraphs(slots, target, drafts)

    def run_blank(self, batch: int, rows: int, drafting: bool) -> tuple[float, float]:
        """Replay a shape with padding alone, which leaves no trace -> ms of the target, of the rest."""
        graphs, device = self.graphs[batch, rows], self.model.state.device
        graphs.slots.zero_()
        start = mark(device)
        graphs.target.replay()
        middle = mark(device)
        graphs.drafts[self.stages[0], drafting].graph.replay()
        end = mark(device)
        return milliseconds(start, middle), milliseconds(middle, end)

    def stages_for(self, plan: StepPlan) -> Stage:
        """The captured variant that covers a plan: stages beyond what a request asked for leave its rows alone."""
        return next(stages for stages in self.stages if plan.stages in stages)

    def run(self, plan: StepPlan, between: Callable[[], None]) -> Judged | None:
        """Replay the step, or None if no graph fits it: then it runs eagerly. `between` runs between its phases."""
        if plan.chunks:
            return None
        batch = bucket_for(len(plan.decodes), self.buckets)
        if batch is None:
            return None
        padding = batch - len(plan.decodes)
        rows = bucket_for(plan.row_bound + padding, self.rows_for(batch))
        graphs = self.graphs.get((batch, rows)) if rows is not None else None
        if graphs is None:
            return None
        draft = graphs.drafts.get((self.stages_for(plan), plan.num_drafting > 0))
        if draft is None:
            return None
        graphs.slots.copy_(to_device([*plan.decodes, *[0] * padding], graphs.slots.device), non_blocking=True)
        graphs.target.replay()
        between()
        draft.graph.replay()
        self.replays += 1
        return draft.judged
