"""A proposer of specdec as LMDeploy runs models: a step's tensors in, drafts out; decode steps replayed as CUDA graphs.

A step's graph has everything in it: absorbing the verified rows, the block, the head and the Markov chain. Block rows
stay out of LMDeploy's cache, so a request needs no room for them. Next: proposer.py, which fills HostRows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lmdeploy.pytorch.backends.graph_runner import GraphRunner
from lmdeploy.pytorch.model_inputs import StepContextManager
from torch import Tensor, nn

from specdec.kernels.kv_cache import cache_slots
from specdec.layers.cache_specs import PagedCache
from specdec.spec_decode.proposers.base import DraftStep
from specdec.spec_decode.proposers.block import BlockProposer

Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


@dataclass(frozen=True, slots=True)
class HostRows:
    """T rows of B requests, as LMDeploy has them after verification.

    `taps` [T, m * Ht]; `requests` [T]: whose the rows are; `row_offsets` [B + 1]: where each one's begin;
    `history` [B]: tokens in the cache in front of the rows; `committed` [B]: rows that stay; `anchors` [B]: the tokens
    just drawn; `page_table` [B, W], 0 where there is no page; `cache`: the draft's layers in those pages.
    """

    taps: Tensor
    requests: Tensor
    row_offsets: Tensor
    history: Tensor
    committed: Tensor
    anchors: Tensor
    page_table: Tensor
    cache: PagedCache


class DraftModule(nn.Module):
    """`positions`: size of the draft's rotary table; whatever lies behind it is drafted badly, but safely."""

    def __init__(self, proposer: BlockProposer, positions: int, ctx_mgr: StepContextManager) -> None:
        super().__init__()
        self.proposer, self.positions, self.ctx_mgr = proposer, positions, ctx_mgr

    def forward(self, rows: HostRows, drafting: bool = True) -> Tensor | None:
        """Absorb the rows; then, if `drafting`, drafts [B, K] int64."""
        step = self._step(rows)
        self.proposer.absorb(step)
        return self.proposer.propose(step).tokens if drafting else None

    def _step(self, rows: HostRows) -> DraftStep:
        offset = torch.arange(rows.taps.shape[0], device=rows.taps.device) - rows.row_offsets[rows.requests]
        positions = (rows.history[rows.requests] + offset).clamp(max=self.positions - 1)
        page_size = rows.cache.k[0].shape[1]
        block_rows = self.proposer.draft.config.block_rows
        return DraftStep(
            taps=rows.taps,
            positions=positions,
            entries=cache_slots(rows.page_table, rows.requests, positions, page_size),
            row_offsets=rows.row_offsets,
            committed=rows.committed,
            slots=torch.zeros_like(rows.anchors),  # LMDeploy has none, and paged drafts need none
            anchors=rows.anchors,
            lengths=(rows.history + rows.committed).clamp(max=self.positions - block_rows),
            page_table=rows.page_table,
            page_size=page_size,
            cache=rows.cache,
        )


def even_rows(num_requests: int, rows_each: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`requests` and `row_offsets` of HostRows where every request has equally many rows."""
    requests = torch.arange(num_requests, device=device)
    return requests.repeat_interleave(rows_each), torch.arange(num_requests + 1, device=device) * rows_each


class CudaGraphs:
    """Captures steps; one pool of memory serves them all, since they run one at a time and results are copied out."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """`run`, captured: calling what is returned replays it, into the same result."""
        run()  # compiles kernels, which a capture cannot
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode='thread_local'):
            result = run()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class DecodeGraph:
    """A captured decode step for up to `batch` requests with K + 1 rows each. Nobody's rows write to page 0."""

    def __init__(
        self, model: DraftModule, batch: int, like: HostRows, rows_each: int, table_width: int, capture: Capture
    ) -> None:
        device = like.taps.device
        self.rows_each = rows_each
        self.numbers = torch.zeros(3, batch, dtype=torch.int64, device=device)
        history, committed, anchors = self.numbers
        requests, row_offsets = even_rows(batch, rows_each, device)
        self.rows = HostRows(
            taps=like.taps.new_zeros(batch * rows_each, like.taps.shape[1]),
            requests=requests,
            row_offsets=row_offsets,
            history=history,
            committed=committed,
            anchors=anchors,
            page_table=like.page_table.new_zeros(batch, table_width),
            cache=like.cache,
        )
        self.replay = capture(lambda: model(self.rows))

    def __call__(self, rows: HostRows) -> Tensor:
        mine, batch = self.rows, rows.anchors.shape[0]
        width = min(rows.page_table.shape[1], mine.page_table.shape[1])
        mine.taps[: batch * self.rows_each].copy_(rows.taps)
        self.numbers.zero_()
        mine.history[:batch].copy_(rows.history)
        mine.committed[:batch].copy_(rows.committed)
        mine.anchors[:batch].copy_(rows.anchors)
        mine.page_table.zero_()
        mine.page_table[:batch, :width].copy_(rows.page_table[:, :width])
        return self.replay()[:batch].clone()


class DraftRunner(GraphRunner):
    """Prompts operator by operator; decode steps by the smallest graph that holds them, if graphs are wanted."""

    make_capture: Callable[[], Capture] = CudaGraphs

    def __init__(self, model: DraftModule, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.graphs: dict[int, DecodeGraph] = {}

    def __call__(self, rows: HostRows, drafting: bool = True) -> Tensor | None:
        return self.model(rows, drafting)

    def wants_graphs(self) -> bool:
        return not self.backend_config.eager_mode and torch.device(self.device).type == 'cuda'

    def decode(self, rows: HostRows) -> Tensor:
        """A step in which every request has K + 1 rows -> drafts [B, K]."""
        graph = next((graph for size, graph in sorted(self.graphs.items()) if size >= rows.anchors.shape[0]), None)
        return self.model(rows) if graph is None else graph(rows)

    def capture(self, sizes: Sequence[int], like: HostRows, rows_each: int) -> None:
        """Graphs for batches of `sizes`. `like`: rows of the dtypes, widths and caches to come."""
        if not self.wants_graphs():
            return
        capture, width = self.make_capture(), -(-self.model.positions // like.cache.k[0].shape[1])
        for batch in sorted(sizes, reverse=True):
            self.graphs[batch] = DecodeGraph(self.model, batch, like, rows_each, width, capture)

    def reset(self) -> None:
        super().reset()
        self.graphs.clear()
