"""What the device owns of every request, by slot: the device's half of the two clocks.

Written at two points of a step: `apply` takes the host's records at its head, the other methods the verdict and the
proposal at its end. Slot 0 is scratch; padding rows use it and no request ever does. Next: agent/batch.py, the reader.
"""

import torch
from torch import Tensor

from specdec.agent.transfer import to_device
from specdec.messages import MAX_STOP_IDS
from specdec.plan import Admit, StepPlan

# columns of `ints`: per-request integers live side by side, so that one gather fetches them all; the first three are
# what a step changes
LENGTH, ANCHOR, NUM_DRAFTS, CAP, END, STOP_FROM, SEED, TOP_K = range(8)
# columns of `floats`
TEMPERATURE, TOP_P, MIN_P = range(3)
NO_ID = -1  # fills the id lists; equal to no token


class SlotState:
    """Tensors with one row per slot: ints [S, 8] int64, floats [S, 3] fp32, drafts [S, K] and survival [S, K] fp32,
    stop_ids and banned_ids [S, MAX_STOP_IDS], page_table [S, P] int32 whose unused entries are 0. `padded`: steps have
    rows beyond their requests', so that the host need not know how many there are.
    """

    def __init__(
        self, num_slots: int, num_drafts: int, table_width: int, device: torch.device, padded: bool = False
    ) -> None:
        self.device, self.padded = device, padded
        self.num_drafts = num_drafts
        self.ints = torch.zeros(num_slots, 8, dtype=torch.int64, device=device)
        self.floats = torch.zeros(num_slots, 3, dtype=torch.float32, device=device)
        self.drafts = torch.zeros(num_slots, num_drafts, dtype=torch.int64, device=device)
        self.survival = torch.ones(num_slots, num_drafts, dtype=torch.float32, device=device)
        self.stop_ids = torch.full((num_slots, MAX_STOP_IDS), NO_ID, dtype=torch.int64, device=device)
        self.banned_ids = torch.full((num_slots, MAX_STOP_IDS), NO_ID, dtype=torch.int64, device=device)
        self.page_table = torch.zeros(num_slots, table_width, dtype=torch.int32, device=device)

    def apply(self, plan: StepPlan) -> None:
        """The host's records: new tenants of slots first, then page-table entries."""
        for admit in plan.admits:
            self._admit(admit)
        for update in plan.page_updates:
            pages = to_device(update.pages, self.device, torch.int32)
            self.page_table[update.slot, update.index : update.index + len(update.pages)] = pages

    def _admit(self, admit: Admit) -> None:
        slot, params = admit.slot, admit.params
        cap = self.num_drafts if params.max_drafts is None else min(params.max_drafts, self.num_drafts)
        seed = params.seed - 2**64 if params.seed >= 2**63 else params.seed  # the same bits as int64
        ints = (admit.length, 0, 0, cap, admit.end, admit.stop_from, seed, params.top_k)
        self.ints[slot] = to_device(ints, self.device)
        floats = (params.temperature, params.top_p, params.min_p)
        self.floats[slot] = to_device(floats, self.device, torch.float32)
        self.stop_ids[slot] = self._id_list(params.stop_ids)
        self.banned_ids[slot] = self._id_list(params.banned_ids)
        self.page_table[slot] = 0

    def _id_list(self, ids: tuple[int, ...]) -> Tensor:
        return to_device(ids + (NO_ID,) * (MAX_STOP_IDS - len(ids)), self.device)

    def commit(self, slots: Tensor, lengths: Tensor) -> None:
        """Chunks that draw no token: lengths [n] of slots [n]."""
        self.ints[slots, LENGTH] = lengths

    def advance(self, slots: Tensor, lengths: Tensor, anchors: Tensor, drafts: Tensor | None) -> None:
        """After a verdict: committed lengths and anchors [n] of slots [n], with their fresh drafts [n, K], if any.

        Slot 0 stays blank: padding rows start at position 0 for ever.
        """
        num_drafts = torch.full_like(lengths, 0 if drafts is None else drafts.shape[1])
        changed = torch.stack([lengths, anchors, num_drafts], 1)
        if self.padded:
            changed = torch.where((slots > 0)[:, None], changed, 0)
        self.ints[:, : NUM_DRAFTS + 1].index_copy_(0, slots, changed)
        if drafts is not None:
            self.drafts.index_copy_(0, slots, drafts)

    def keep_survival(self, slots: Tensor, survival: Tensor) -> None:
        """Survivals [n, K] of the drafts just proposed."""
        self.survival.index_copy_(0, slots, survival)
