"""What the device owns of every request, by slot: the device's half of the two clocks.

Written at two points of a step: `apply` takes the host's records at its head, the other methods the verdict and the
proposal at its end. Slot 0 is scratch; padding rows use it and no request ever does. Next: agent/batch.py, the reader.
"""

import torch
from torch import Tensor

from specdec.agent.transfer import tensor_to_device, to_device
from specdec.messages import DRAFT_SAMPLINGS, MAX_BANNED_IDS, MAX_STOP_IDS, SamplingParams
from specdec.plan import RULES, Admit, Stage, StepPlan
from specdec.spec_decode.rules import HEAD, NO_ID, NO_OUTPUT, NOT_THINKING, Rules
from specdec.spec_decode.verify_length import EVERY_DRAFT, NO_BUDGET, AcceptanceHistory, LengthRule

# columns of `ints`: per-request integers live side by side, so that one gather fetches them all; the first three are
# what a step changes
LENGTH, ANCHOR, NUM_DRAFTS, CAP, END, STOP_FROM, SEED, TOP_K, DRAFT_SAMPLING = range(9)
# columns of `floats`
TEMPERATURE, TOP_P, MIN_P = range(3)


class SlotState:
    """Tensors with one row per slot: ints [S, 9] int64, floats [S, 3] fp32, drafts [S, K] and survival [S, K] fp32,
    stop_ids and banned_ids [S, n], page_table [S, P] int32 whose unused entries are 0; `rules`: what logits rules go
    by; `draft_probabilities` [S, K, V] fp32, or nothing unless `probabilistic`. `padded`: steps have rows beyond their
    requests', so that the host need not know how many there are. `lengths`: how verify lengths are chosen; `budget`
    [1]: drafted rows of this step; `history`: acceptance so far, where survivals come from without a confidence head.
    """

    def __init__(
        self,
        num_slots: int,
        num_drafts: int,
        table_width: int,
        vocabulary: int,
        device: torch.device,
        padded: bool = False,
        probabilistic: bool = False,
        lengths: LengthRule = EVERY_DRAFT,
    ) -> None:
        self.device, self.padded, self.lengths = device, padded, lengths
        self.num_drafts = num_drafts
        self.ints = torch.zeros(num_slots, 9, dtype=torch.int64, device=device)
        self.floats = torch.zeros(num_slots, 3, dtype=torch.float32, device=device)
        self.drafts = torch.zeros(num_slots, num_drafts, dtype=torch.int64, device=device)
        self.survival = torch.ones(num_slots, num_drafts, dtype=torch.float32, device=device)
        self.stop_ids = torch.full((num_slots, MAX_STOP_IDS), NO_ID, dtype=torch.int64, device=device)
        self.banned_ids = torch.full((num_slots, MAX_BANNED_IDS), NO_ID, dtype=torch.int64, device=device)
        self.page_table = torch.zeros(num_slots, table_width, dtype=torch.int32, device=device)
        self.rules = Rules.allocate(num_slots, num_drafts, vocabulary, device)
        shape = (num_slots, num_drafts, vocabulary) if probabilistic else (0, num_drafts, vocabulary)
        self.draft_probabilities = torch.zeros(shape, dtype=torch.float32, device=device)
        self.budget = torch.full((1,), NO_BUDGET, dtype=torch.int64, device=device)
        self.history = AcceptanceHistory.allocate(num_slots, num_drafts, device)
        self._ruled_slots: set[int] = set()  # whose rows of `rules` are not blank

    @staticmethod
    def bytes_for(num_slots: int, num_drafts: int, vocabulary: int, probabilistic: bool) -> int:
        """What the parts that grow with the vocabulary take; the others are small."""
        proposals = 4 * num_slots * num_drafts * vocabulary if probabilistic else 0
        return Rules.bytes_for(num_slots, num_drafts, vocabulary) + proposals

    def apply(self, plan: StepPlan) -> None:
        """The host's records: new tenants of slots first, then page-table entries."""
        if plan.draft_budget is not None:
            self.budget.fill_(plan.draft_budget)
        for admit in plan.admits:
            self._admit(admit)
        for update in plan.page_updates:
            pages = to_device(update.pages, self.device, torch.int32)
            self.page_table[update.slot, update.index : update.index + len(update.pages)] = pages

    def _admit(self, admit: Admit) -> None:
        slot, params = admit.slot, admit.params
        cap = self.num_drafts if params.max_drafts is None else min(params.max_drafts, self.num_drafts)
        seed = params.seed - 2**64 if params.seed >= 2**63 else params.seed  # the same bits as int64
        drawn = DRAFT_SAMPLINGS.index(params.draft_sampling)
        ints = (admit.length, 0, 0, cap, admit.end, admit.stop_from, seed, params.top_k, drawn)
        self.ints[slot] = to_device(ints, self.device)
        floats = (params.temperature, params.top_p, params.min_p)
        self.floats[slot] = to_device(floats, self.device, torch.float32)
        self.stop_ids[slot] = self._id_list(params.stop_ids, MAX_STOP_IDS)
        self.banned_ids[slot] = self._id_list(params.banned_ids, MAX_BANNED_IDS)
        self.page_table[slot] = 0
        if self.lengths.reads_survival:
            self.history.forget(slot)
        if slot in self._ruled_slots:
            self._blank_rules(slot)
        if admit.stages & RULES:
            self._admit_rules(admit)

    def _id_list(self, ids: tuple[int, ...], width: int) -> Tensor:
        return to_device(ids + (NO_ID,) * (width - len(ids)), self.device)

    def _blank_rules(self, slot: int) -> None:
        rules, tables = self.rules, self.rules.tables
        tables.penalties[slot] = to_device((1, 0, 0), self.device, torch.float32)
        tables.bias_values[slot] = 0
        tables.num_bias[slot] = 0
        tables.masks[slot] = -1
        rules.word_ends[slot] = NO_ID
        rules.thinking[slot] = NO_ID
        self._ruled_slots.discard(slot)

    def _admit_rules(self, admit: Admit) -> None:
        """What its rules need; the history is the request's own prompt and what it has emitted, whatever was cached."""
        slot, params, stages = admit.slot, admit.params, admit.stages
        tables = self.rules.tables
        self._ruled_slots.add(slot)
        if Stage.PENALTIES in stages:
            strengths = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            tables.penalties[slot] = to_device(strengths, self.device, torch.float32)
            tables.counts[slot] = 0
            tables.counts[slot].index_fill_(0, to_device(admit.prompt_ids, self.device), 1)
            emitted = to_device(admit.output_ids, self.device)
            tables.counts[slot].index_add_(0, emitted, torch.full_like(emitted, 2, dtype=torch.int32))
        if Stage.BIAS in stages:
            count = len(params.logit_bias)
            tables.bias_ids[slot, :count] = to_device([i for i, _ in params.logit_bias], self.device)
            values = to_device([value for _, value in params.logit_bias], self.device, torch.float32)
            tables.bias_values[slot, :count] = values
            tables.num_bias[slot] = count
        if Stage.WORDS in stages:
            self._admit_words(slot, params.bad_words, admit.output_ids)
        if params.allowed_ids:
            tables.masks[slot] = mask_words(params.allowed_ids, tables.counts.shape[1]).to(self.device)
        if Stage.THINKING in stages:
            self._admit_thinking(admit, params)

    def _admit_words(self, slot: int, words: tuple[tuple[int, ...], ...], output_ids: tuple[int, ...]) -> None:
        heads = [(NO_ID,) * (HEAD + 1 - len(word)) + word[:-1] for word in words]
        self.rules.word_heads[slot, : len(words)] = to_device(heads, self.device)
        self.rules.word_ends[slot, : len(words)] = to_device([word[-1] for word in words], self.device)
        recent = output_ids[-HEAD:]
        self.rules.recent[slot] = to_device((NO_OUTPUT,) * (HEAD - len(recent)) + recent, self.device)

    def _admit_thinking(self, admit: Admit, params: SamplingParams) -> None:
        assert params.think_ids is not None, 'a thinking budget without marks'
        self.rules.thinking[admit.slot] = to_device((params.thinking_budget, *params.think_ids), self.device)
        start = reasoning_start(admit.output_ids, params.think_ids, params.reasoning_open)
        self.rules.think_starts[admit.slot] = NOT_THINKING if start is None else len(admit.prompt_ids) + start

    def write_masks(self, slots: list[int], masks: Tensor) -> None:
        """This step's masks [n, K + 1, V / 32] int32, on the host, of slots whose requests follow a grammar."""
        masks = tensor_to_device(masks, self.device)
        self.rules.tables.masks.index_copy_(0, to_device(slots, self.device), masks)

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

    def keep_draft_probabilities(self, slots: Tensor, probabilities: Tensor) -> None:
        """What the drafts just proposed were drawn from [n, K, V]."""
        self.draft_probabilities.index_copy_(0, slots, probabilities)


def mask_words(ids: tuple[int, ...], vocabulary: int) -> Tensor:
    """A mask that allows these ids [V / 32] int32, on the host."""
    bits = torch.zeros(-(-vocabulary // 32) * 32, dtype=torch.int64)
    bits[list(ids)] = 1
    return (bits.view(-1, 32) << torch.arange(32)).sum(1).to(torch.int32)


def reasoning_start(output_ids: tuple[int, ...], marks: tuple[int, int], opened: bool) -> int | None:
    """Place in the output of the first token of the reasoning section that is open behind it; None if none is.

    `opened`: the prompt ends inside a section.
    """
    opening, closing = marks
    for position in range(len(output_ids) - 1, -1, -1):
        if output_ids[position] == closing:
            return None
        if output_ids[position] == opening:
            return position + 1
    return 0 if opened else None
