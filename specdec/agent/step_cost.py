"""What the phases of a decode step cost, in milliseconds: measured at start-up, refined by the steps that are run.

Three phases: the target's forward over a batch's rows, what follows without a block (verdict and absorb), and the block
itself. A table has a cell for each (batch size, rows) that steps are sized for. Times are noisy and have outliers, so a
cell is a median; cells that nobody runs move with their neighbours. Next: spec_decode/draft_budget.py, which asks.
"""

import json
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from specdec.agent.batch import decode_batch
from specdec.agent.graph_runner import GraphRunner
from specdec.agent.marks import mark, milliseconds
from specdec.agent.step_model import StepModel
from specdec.plan import NO_STAGE

WINDOW = 31  # observations that a cell's median is taken of
LEAST = 1e-3  # ms: differences of two noisy times may come out at nothing, or below
OUTLIER = 5.0  # an observation that many times what was expected says nothing of the cell


class Curve:
    """Milliseconds over a size, from medians at some sizes: non-decreasing, defined for every size above 0.

    `measured` at start-up gives the shape; observations move the cells that they hit, and the median of what they moved
    moves the others, since what changes with time (longer contexts, another clock) changes all sizes alike. `stepwise`:
    a size costs what the next larger cell costs, as with graphs; else what lies between two cells.
    """

    def __init__(self, measured: dict[int, float], stepwise: bool) -> None:
        assert measured, 'a curve needs one measurement'
        self.sizes, self.stepwise = sorted(measured), stepwise
        self.measured = {size: max(float(measured[size]), LEAST) for size in self.sizes}
        self._seen: dict[int, deque[float]] = {}
        self._cells: list[float] | None = None

    def observe(self, size: int, milliseconds: float) -> None:
        """A step of this size took so long. Sizes between two cells are counted for the nearer one, less what the
        difference is expected to cost.
        """
        expected = self(size)
        if milliseconds > OUTLIER * expected + 1:
            return
        nearest = min(self.sizes, key=lambda cell: abs(cell - size))
        cell = max(milliseconds, LEAST) * self(nearest) / expected
        self._seen.setdefault(nearest, deque(maxlen=WINDOW)).append(cell)
        self._cells = None

    def cells(self) -> list[float]:
        """Milliseconds at `sizes`, non-decreasing."""
        if self._cells is None:
            own = {size: median(seen) for size, seen in self._seen.items()}
            drift = median(value / self.measured[size] for size, value in own.items()) if own else 1.0
            found, highest = [], 0.0
            for size in self.sizes:
                highest = max(highest, own.get(size, self.measured[size] * drift))
                found.append(highest)
            self._cells = found
        return self._cells

    def __call__(self, size: int) -> float:
        cells, sizes = self.cells(), self.sizes
        index = bisect_left(sizes, size)
        if index == len(sizes):  # beyond the last: on along the last slope
            if index == 1:
                return cells[0] * size / sizes[0]
            slope = (cells[-1] - cells[-2]) / (sizes[-1] - sizes[-2])
            return cells[-1] + slope * (size - sizes[-1])
        if index == 0 or self.stepwise or sizes[index] == size:
            return cells[index]
        low, high = sizes[index - 1], sizes[index]
        return cells[index - 1] + (cells[index] - cells[index - 1]) * (size - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Start-up's medians in ms: target and absorb by (batch, rows), draft by batch."""

    target: dict[tuple[int, int], float]
    absorb: dict[tuple[int, int], float]
    draft: dict[int, float]


class StepCost:
    """The three phases. A batch size between two measured ones costs, row for row, what the larger one costs."""

    def __init__(self, measured: Measurement, stepwise: bool) -> None:
        self.batches = sorted({batch for batch, _ in measured.target})
        self.stepwise = stepwise
        self._target = self._curves(measured.target)
        self._absorb = self._curves(measured.absorb)
        self._draft = Curve(measured.draft, stepwise)

    def _curves(self, cells: dict[tuple[int, int], float]) -> dict[int, Curve]:
        return {
            batch: Curve({rows: ms for (b, rows), ms in cells.items() if b == batch}, self.stepwise)
            for batch in self.batches
        }

    def _batch(self, batch: int) -> int:
        return self.batches[min(bisect_left(self.batches, batch), len(self.batches) - 1)]

    def _at(self, curves: dict[int, Curve], batch: int, rows: int) -> float:
        size = self._batch(batch)
        if self.stepwise:
            return curves[size](rows + max(size - batch, 0))  # the padding requests have a row each
        index = self.batches.index(size)
        if size <= batch or index == 0:
            return curves[size](rows)
        low = self.batches[index - 1]
        share = (batch - low) / (size - low)
        return curves[low](rows) * (1 - share) + curves[size](rows) * share

    def target(self, batch: int, rows: int) -> float:
        return self._at(self._target, batch, rows)

    def absorb(self, batch: int, rows: int) -> float:
        return self._at(self._absorb, batch, rows)

    def draft(self, batch: int) -> float:
        return self._draft(batch)

    def observe(self, batch: int, rows: int, target_ms: float, rest_ms: float, drafting: bool) -> None:
        """A decode step without prompt chunks: its target phase, and all that came behind the logits."""
        size = self._batch(batch)
        at = rows + max(size - batch, 0) if self.stepwise else rows
        self._target[size].observe(at, target_ms)
        if drafting:
            self._draft.observe(batch, rest_ms - self.absorb(batch, rows))
        else:
            self._absorb[size].observe(at, rest_ms)

    def describe(self) -> dict[str, object]:
        """The table as plain data, ms: what `dump` writes and `load` reads."""

        def table(curves: dict[int, Curve]) -> list[list[float]]:
            return [[b, rows, ms] for b, curve in curves.items() for rows, ms in zip(curve.sizes, curve.cells())]

        return {
            'stepwise': self.stepwise,
            'target': table(self._target),
            'absorb': table(self._absorb),
            'draft': [[size, ms] for size, ms in zip(self._draft.sizes, self._draft.cells())],
        }

    def dump(self, path: Path) -> None:
        path.write_text(json.dumps(self.describe(), indent=1) + '\n')

    @classmethod
    def load(cls, path: Path) -> 'StepCost':
        table = json.loads(path.read_text())
        measured = Measurement(
            target={(int(b), int(rows)): ms for b, rows, ms in table['target']},
            absorb={(int(b), int(rows)): ms for b, rows, ms in table['absorb']},
            draft={int(b): ms for b, ms in table['draft']},
        )
        return cls(measured, table['stepwise'])


# -------------------------------------------------------------------------------------------------- measuring a step
RunStep = Callable[[int, int, bool], tuple[float, float]]  # batch, rows, drafting -> ms of the target, of the rest


def measure(run: RunStep, shapes: Sequence[tuple[int, int]], repeats: int) -> Measurement:
    """Medians of repeated steps at (batch, rows) shapes."""
    target, absorb, draft = {}, {}, {}
    for batch, rows in shapes:
        plain = [run(batch, rows, False) for _ in range(repeats)]
        target[batch, rows] = median(ms for ms, _ in plain)
        absorb[batch, rows] = median(ms for _, ms in plain)
        if batch not in draft:
            drafted = median(run(batch, rows, True)[1] for _ in range(repeats))
            draft[batch] = drafted - absorb[batch, rows]
    return Measurement(target, absorb, draft)


@torch.inference_mode()
def measure_costs(model: StepModel, graphs: GraphRunner | None, max_batch_size: int) -> StepCost:
    """Steps of padding rows alone, which leave no trace: every captured shape, or some if steps run eagerly."""
    state, num_drafts = model.state, model.state.num_drafts
    if graphs is not None:
        costs = StepCost(measure(graphs.run_blank, graphs.shapes(), repeats=5), stepwise=True)
    else:

        def run(batch: int, rows: int, drafting: bool) -> tuple[float, float]:
            slots = torch.zeros(batch, dtype=torch.int64, device=state.device)
            start = mark(state.device)
            prepared = decode_batch(state, slots, state.page_table.shape[1], rows, model.page_size, NO_STAGE)
            output, logits = model.run_target(prepared)
            middle = mark(state.device)
            model.run_draft(prepared, output, logits, NO_STAGE, drafting)
            end = mark(state.device)
            state.ints[0] = 0  # where steps are not padded for good, the scratch slot has moved
            return milliseconds(start, middle), milliseconds(middle, end)

        batches = sorted({min(2**i, max_batch_size) for i in range(max_batch_size.bit_length() + 1)})
        shapes = [(b, b * n) for b in batches for n in sorted({1, min(2, num_drafts + 1), num_drafts + 1})]
        run(*shapes[0], True)  # the first step of all takes memory
        costs = StepCost(measure(run, shapes, repeats=3), stepwise=False)
    return costs
