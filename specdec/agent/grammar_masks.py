"""Grammars between the two phases of a step: the host walks them along this step's drafts and writes the rows' masks.

It needs the verdict and the drafts of the step before, so only steps with a grammar wait for them, while the target
already runs. Next: engine/grammar.py, where guides come from.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.agent.state import SlotState
from specdec.agent.transfer import HostCopy
from specdec.plan import Admit, StepPlan


class Guide(Protocol):
    """One request's place in its grammar."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """These were emitted."""

    def fill(self, drafts: Sequence[int], masks: Tensor) -> None:
        """Masks [K + 1, V / 32] int32 of the rows behind 0, 1, ... of the drafts; the place stays what it was.

        Rows behind a draft that the grammar forbids are all ones: no such draft is ever the pick.
        """


MakeGuide = Callable[[Admit], Guide]


@dataclass(slots=True)
class _Tenant:
    """Who has a slot: his guide, and the drafts behind what the guide was told last."""

    guide: Guide
    drafts: list[int]


@dataclass(frozen=True, slots=True)
class _Unread:
    tenants: list[tuple[int, _Tenant]]  # with their rows in the result
    results: HostCopy


class GrammarMasks:
    def __init__(self, state: SlotState, make_guide: MakeGuide) -> None:
        self._state, self._make_guide = state, make_guide
        self._tenants: dict[int, _Tenant] = {}  # by slot
        self._unread: deque[_Unread] = deque()

    def admit(self, admits: Sequence[Admit]) -> None:
        for admit in admits:
            self._tenants.pop(admit.slot, None)
            if admit.params.grammar is not None:
                self._tenants[admit.slot] = _Tenant(self._make_guide(admit), [])

    def write(self, slots: Sequence[int]) -> None:
        """This step's masks for the slots that have a grammar and draw a token in it."""
        if not slots:
            return
        self._catch_up()
        shape = self._state.rules.tables.masks.shape[1:]
        masks = torch.full((len(slots), *shape), -1, dtype=torch.int32)
        for slot, rows in zip(slots, masks):
            tenant = self._tenants[slot]
            tenant.guide.fill(tenant.drafts, rows)
        self._state.write_masks(list(slots), masks)

    def note_launched(self, plan: StepPlan, results: HostCopy) -> None:
        """The step's table is on its way: what it emits, and the drafts for the next one."""
        slots = plan.drawing_slots
        self._unread.append(_Unread([(slots.index(slot), self._tenants[slot]) for slot in plan.grammars], results))

    def _catch_up(self) -> None:
        num_drafts = self._state.num_drafts
        while self._unread:
            unread = self._unread.popleft()
            table = unread.results.wait()[0]
            for row, tenant in unread.tenants:
                count, _, _, *rest = table[row].tolist()
                tenant.guide.advance(rest[:count])
                tenant.drafts = rest[num_drafts + 1 :]
