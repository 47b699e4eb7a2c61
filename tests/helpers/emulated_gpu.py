"""The GPU's way through a step, on a CPU: padded rows, bucketed batches, a step launched before the last one is read.

What is emulated is everything but the recording: where a graph would be replayed, its two phases run. With `triton` the
operators are the Triton kernels, interpreted.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from specdec.agent.batch import decode_batch
from specdec.agent.graph_runner import GraphRunner, bucket_for
from specdec.agent.step_model import Judged
from specdec.engine.engine import Engine
from specdec.plan import StepPlan

OPERATORS = (
    'linear', 'norm', 'rotary', 'kv_cache', 'paged_attention', 'block_attention', 'markov', 'moe', 'pick',
    'logit_rules', 'filter_threshold', 'sink_attention', 'indexer', 'hyper_connections',
    'causal_conv1d', 'gated_delta_rule', 'gates',
)  # fmt: skip


class EmulatedGraphs(GraphRunner):
    """Runs what would be captured, at the shapes it would be captured with."""

    def run(self, plan: StepPlan, between: Callable[[], None]) -> Judged | None:
        if plan.chunks:
            return None
        batch = bucket_for(len(plan.decodes), self.buckets)
        assert batch is not None
        padding = batch - len(plan.decodes)
        rows = bucket_for(plan.row_bound + padding, self.rows_for(batch))
        slots = torch.tensor([*plan.decodes, *[0] * padding])
        prepared = decode_batch(self.model.state, slots, self.table_width, rows, self.model.page_size, self.stages[-1])
        self.replays += 1
        output, logits = self.model.run_target(prepared)
        between()
        return self.model.run_draft(prepared, output, logits, self.stages_for(plan), plan.num_drafting > 0)


def as_on_a_gpu(engine: Engine) -> Engine:
    """The engine with padded, bucketed, overlapped steps."""
    engine.agent.model.state.padded = True
    engine.agent.graphs = EmulatedGraphs(engine.agent.model, engine.info.max_batch_size)
    engine.scheduler.config = replace(engine.scheduler.config, overlap=1)
    return engine


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Triton kernels in place of the references, on the CPU."""
    implementations = [importlib.import_module(f'specdec.kernels.{name}')._implementation for name in OPERATORS]
    for implementation in implementations:
        implementation.modules['cpu'] = 'triton'
        implementation.loaded.clear()
    try:
        yield
    finally:
        for implementation in implementations:
            implementation.modules['cpu'] = 'ref'
            implementation.loaded.clear()
