"""A device without tensors: runs StepPlans as the real one does, on caches that remember what was written to them.

Its "model" draws token f(all tokens before), so the right output of any prompt is known beforehand. A cache entry keeps
the hash chain of the prefix it was computed from; a row whose context is not one unbroken chain, in the target's or in
the draft's pages, is a fault of the scheduler (a page given away, a stale table entry, a wrong prefix hit) and raises.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from specdec.agent.state import SlotState
from specdec.messages import EngineRequest, RequestOutput, SamplingParams
from specdec.plan import Admit, Save, SlotResult, StepPlan, StepResult
from specdec.scheduler.scheduler import Scheduler, SchedulerConfig

VOCABULARY = 50
START = 1  # the chain of the empty prefix


def link(chain: int, token: int) -> int:
    """The chain of a prefix one token longer."""
    return hash((chain, token, 0x5EED))


def next_token(chain: int) -> int:
    return (chain >> 7) % VOCABULARY


def continuation(prompt: Sequence[int], count: int, stop_ids: Sequence[int] = (), minimum: int = 0) -> list[int]:
    """What decoding one by one gives: at most `count` tokens; a stop id behind the first `minimum` ends them."""
    chain, tokens = START, []
    for token in prompt:
        chain = link(chain, token)
    while len(tokens) < count and not (len(tokens) > minimum and tokens[-1] in stop_ids):
        tokens.append(next_token(chain))
        chain = link(chain, tokens[-1])
    return tokens


@dataclass(slots=True)
class Slot:
    admit: Admit
    length: int
    cap: int
    table: list[int] = field(default_factory=list)
    anchor: int | None = None
    drafts: list[int] = field(default_factory=list)
    finished: bool = False


class SimulatedDevice:
    """`accept(rng)` says how many of a fresh block's drafts are right."""

    def __init__(
        self,
        num_slots: int,
        num_drafts: int,
        num_pages: int,
        page_size: int,
        accept: Callable[[], int],
        num_states: int = 0,
    ) -> None:
        self.num_states = num_states
        self.states: dict[int, tuple[int, int]] = {}  # copies of slots: length and chain
        self.num_drafts, self.page_size, self.accept = num_drafts, page_size, accept
        self.slots: list[Slot | None] = [None] * num_slots
        self.target: list[list[tuple[int, int] | None]] = [[None] * page_size for _ in range(num_pages)]
        self.draft: list[list[tuple[int, int] | None]] = [[None] * page_size for _ in range(num_pages)]

    # ----------------------------------------------------------------------------------------------------- caches
    def read(self, pages: list[list[tuple[int, int] | None]], table: list[int], length: int) -> int:
        """The chain of a context of `length` tokens; it must be unbroken."""
        chain = START
        for position in range(length):
            page = table[position // self.page_size] if position // self.page_size < len(table) else 0
            assert page, f'position {position} of {length} has no page'
            entry = pages[page][position % self.page_size]
            assert entry is not None, f'position {position} of {length} was never written'
            assert entry[0] == chain, f'position {position} of {length} was written for another prefix'
            chain = entry[1]
        return chain

    def write(
        self, pages: list[list[tuple[int, int] | None]], slot: Slot, position: int, entry: tuple[int, int]
    ) -> None:
        page = slot.table[position // self.page_size] if position // self.page_size < len(slot.table) else 0
        if page:
            pages[page][position % self.page_size] = entry

    # ------------------------------------------------------------------------------------------------------- step
    def execute(self, plan: StepPlan) -> StepResult:
        for admit in plan.admits:
            cap = self.num_drafts if admit.params.max_drafts is None else admit.params.max_drafts
            self.slots[admit.slot] = Slot(admit, admit.length, min(cap, self.num_drafts))
        for update in plan.page_updates:
            table = self._slot(update.slot).table
            assert update.index == len(table), 'a page update leaves a hole or replaces a page'
            assert 0 not in update.pages, 'the scratch page was handed out'
            table += update.pages
        for admit in plan.admits:
            self._restore(admit)
        assert plan.decodes or plan.chunks, 'an empty step'
        assert len({*plan.decodes, *(c.slot for c in plan.chunks)}) == len(plan.decodes) + len(plan.chunks)
        assert [c.final for c in plan.chunks] == sorted(c.final for c in plan.chunks), 'unfinished chunks come first'
        results, rows = [], 0
        for chunk in plan.chunks:
            slot = self._slot(chunk.slot)
            assert chunk.token_ids, 'an empty chunk'
            assert chunk.start == slot.length, 'a chunk starts where its request ends'
            self._check_width(plan, slot, chunk.start + len(chunk.token_ids))
            tokens = self._forward(slot, list(chunk.token_ids))
            self._absorb(slot, list(chunk.token_ids))
            slot.length += len(chunk.token_ids)
            if chunk.final:
                results.append(self._emit(plan, chunk.slot, slot, [tokens[-1]], 0))
        for number in plan.decodes:
            slot = self._slot(number)
            if slot.finished:  # launched before the host knew
                results.append(SlotResult(number, (), 0, None))
                continue
            result, verified = self._decode(plan, number, slot)
            results.append(result)
            rows += 1 + verified
        assert rows <= plan.row_bound, 'more decoding rows than the plan allows for'
        for save in plan.saves:
            self._save(save)
        return StepResult(plan.step, tuple(results))

    def _restore(self, admit: Admit) -> None:
        """Where something is kept by slot, a request begins behind a prefix with what goes with it, or at 0."""
        if not self.num_states or not admit.length:
            assert not admit.state, 'a state for a request that needs none'
            return
        chain = self.read(self.target, self._slot(admit.slot).table, admit.length)
        assert self.states[admit.state] == (admit.length, chain), 'a state of another prefix'

    def _save(self, save: Save) -> None:
        slot = self._slot(save.slot)
        assert 1 <= save.state <= self.num_states, 'a state that is not there'
        assert save.length == slot.length, 'a copy of a slot that has gone on'
        assert save.length % self.page_size == 0, 'a copy inside a page'
        self.states[save.state] = (save.length, self.read(self.target, slot.table, save.length))

    def _decode(self, plan: StepPlan, number: int, slot: Slot) -> tuple[SlotResult, int]:
        assert slot.anchor is not None, 'a request decodes before its prompt ended'
        room = slot.admit.end - 1 - slot.length
        assert room >= 1, 'a request decodes that has reached its end'
        verified = max(0, min(len(slot.drafts), slot.cap, room - 1))
        ids = [slot.anchor, *slot.drafts[:verified]]
        self._check_width(plan, slot, slot.length + len(ids))
        picks = self._forward(slot, ids)
        accepted = 0
        while accepted < verified and picks[accepted] == slot.drafts[accepted]:
            accepted += 1
        self._absorb(slot, ids, committed=1 + accepted)
        slot.length += 1 + accepted
        return self._emit(plan, number, slot, picks[: 1 + accepted], verified), verified

    def _forward(self, slot: Slot, ids: list[int]) -> list[int]:
        """Write the rows behind what is committed and return each row's pick."""
        chain, picks = self.read(self.target, slot.table, slot.length), []
        for i, token in enumerate(ids):
            after = link(chain, token)
            position = slot.length + i
            assert position < slot.admit.end, 'a row behind the end'
            self.write(self.target, slot, position, (chain, after))
            assert self.read(self.target, slot.table, position + 1) == after, 'a row found no page of its own'
            picks.append(next_token(after))
            chain = after
        return picks

    def _absorb(self, slot: Slot, ids: list[int], committed: int | None = None) -> None:
        """The draft's context: what is rejected gets nonsense, as on the device."""
        chain = self.read(self.draft, slot.table, slot.length)
        for i, token in enumerate(ids):
            right = committed is None or i < committed
            after = link(chain, token)
            self.write(self.draft, slot, slot.length + i, (chain, after) if right else (0, 0))
            chain = after

    def _emit(self, plan: StepPlan, number: int, slot: Slot, picks: list[int], verified: int) -> SlotResult:
        params, first = slot.admit.params, slot.length - len(picks) + 1
        tokens = picks[: slot.admit.end - first]
        finish = 'length' if first + len(tokens) >= slot.admit.end else None
        for i, token in enumerate(tokens):
            if token in params.stop_ids and first + i >= slot.admit.stop_from:
                tokens, finish = tokens[: i + 1], 'stop'
                break
        slot.anchor, slot.finished = tokens[-1], finish is not None
        slot.drafts = self._propose(slot) if plan.num_drafting and not slot.finished else []
        return SlotResult(number, tuple(tokens), verified, finish)

    def _propose(self, slot: Slot) -> list[int]:
        chain = self.read(self.draft, slot.table, slot.length)
        assert chain == self.read(self.target, slot.table, slot.length), 'target and draft disagree on the prefix'
        assert slot.anchor is not None
        chain, drafts, right = link(chain, slot.anchor), [], self.accept()
        for k in range(self.num_drafts):
            token = next_token(chain)
            drafts.append(token if k < right else (token + 1) % VOCABULARY)
            chain = link(chain, drafts[-1])
        return drafts

    def _slot(self, number: int) -> Slot:
        slot = self.slots[number]
        assert number != 0, 'slot 0 is scratch'
        assert slot is not None, f'slot {number} was never admitted'
        return slot

    def _check_width(self, plan: StepPlan, slot: Slot, tokens: int) -> None:
        assert len(slot.table) <= plan.table_width, 'the page table is cut off'
        assert tokens <= len(slot.table) * self.page_size, 'rows without pages'


def random_accept(seed: int, most: int) -> Callable[[], int]:
    rng = random.Random(seed)
    return lambda: rng.randint(0, most)


class Host:
    """A scheduler and a simulated device, with every rule of the page accounting checked after each move.

    `texts`: tokens received by request id. Up to `overlap` steps are launched before the first of them is read.
    """

    def __init__(self, config: SchedulerConfig, accept: Callable[[], int]) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        slots = config.max_batch_size + 1
        self.device = SimulatedDevice(
            slots, config.num_drafts, config.num_pages, config.page_size, accept, config.num_states
        )
        width = -(-(config.session_len + 2 * (config.num_drafts + 1)) // config.page_size)
        self.state = SlotState(slots, config.num_drafts, width, 8, torch.device('cpu'))
        self.unread: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.requests: dict[int, EngineRequest] = {}
        self.texts: dict[int, list[int]] = {}
        self.outputs: dict[int, list[RequestOutput]] = {}
        self.finished: dict[int, str] = {}
        self.admitted: list[int] = []

    # ------------------------------------------------------------------------------------------------------ moves
    def add(self, prompt: Sequence[int], params: SamplingParams) -> int:
        request_id = len(self.requests) + 1
        self.requests[request_id] = EngineRequest(request_id, tuple(prompt), params)
        self.texts[request_id], self.outputs[request_id] = [], []
        self.scheduler.add(self.requests[request_id])
        self.check()
        return request_id

    @property
    def can_launch(self) -> bool:
        return len(self.unread) <= self.config.overlap

    def launch(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is None:
            assert self.unread or not self.scheduler.has_work(), 'nothing runs although there is work'
            return None
        self.plans.append(plan)
        self._check_order(plan)
        self.state.apply(plan)
        self._check_tables()
        self.unread.append(self.device.execute(plan))
        self.check()
        return plan

    def read(self) -> list[RequestOutput]:
        outputs = self.scheduler.commit(self.unread.popleft())
        for output in outputs:
            assert output.request_id not in self.finished, 'output behind the end'
            assert output.token_ids, 'an output without tokens'
            assert output.drafted >= len(output.token_ids) - 1
            self.texts[output.request_id] += output.token_ids
            self.outputs[output.request_id].append(output)
            if output.finish_reason is not None:
                self.finished[output.request_id] = output.finish_reason
        self.check()
        return outputs

    def abort(self, request_id: int) -> None:
        outputs = self.scheduler.abort([request_id])
        assert len(outputs) == (request_id not in self.finished)
        self.finished.setdefault(request_id, 'abort')
        self.check()

    def step(self) -> None:
        """One turn of the engine's loop."""
        launched = self.can_launch and self.launch() is not None
        if self.unread and (not launched or not self.can_launch):
            self.read()

    def drain(self) -> None:
        budget = 100 + 60 * sum(self.length_limit(r) for r in self.requests.values())
        while self.scheduler.has_work():
            budget -= 1
            assert budget > 0, 'no end in sight'
            self.step()
        self.scheduler.check()
        assert self.scheduler.pages.num_available == self.config.num_pages - 1
        for request_id in self.requests:
            self.check_text(request_id)

    # ----------------------------------------------------------------------------------------------------- checks
    def length_limit(self, request: EngineRequest) -> int:
        return min(len(request.prompt_ids) + request.params.max_new_tokens, self.config.session_len)

    def check_text(self, request_id: int) -> None:
        """Exactly what decoding one by one gives, or as much of it as came before an abort."""
        request, text = self.requests[request_id], self.texts[request_id]
        params, count = request.params, self.length_limit(request) - len(request.prompt_ids)
        expected = continuation(request.prompt_ids, count, params.stop_ids, params.min_new_tokens)
        if self.finished.get(request_id) == 'abort':
            assert text == expected[: len(text)]
        else:
            assert text == expected
            stopped = text[-1] in params.stop_ids and len(text) > params.min_new_tokens
            assert self.finished[request_id] == ('stop' if stopped else 'length')

    def check(self) -> None:
        scheduler, size = self.scheduler, self.config.page_size
        scheduler.pages.check()
        held = [page for sequence in scheduler.running for page in sequence.pages]
        assert scheduler.pages.num_held == len(set(held))
        assert len({s.slot for s in scheduler.running} - {0}) == len(scheduler.running) <= self.config.max_batch_size
        for sequence in scheduler.running:
            assert sequence.published * size <= sequence.length, 'a page with uncommitted tokens is findable'
            for i, page in enumerate(sequence.pages):
                # a page that two requests hold must be full of committed tokens for both, so that none writes to it
                assert held.count(page) == 1 or (i + 1) * size <= sequence.length
        for queue in (scheduler.running, list(scheduler.waiting)):
            arrivals = [s.request.request_id for s in queue]
            assert arrivals == sorted(arrivals), 'not in order of arrival'
        for request_id, text in self.texts.items():
            self._check_findable([*self.requests[request_id].prompt_ids, *text])

    def _check_findable(self, tokens: list[int]) -> None:
        """What a prompt starting with these tokens would find is theirs, in target and draft, and not the anchor."""
        pages, size = self.scheduler.pages.match([*tokens, VOCABULARY]), self.config.page_size
        chain = START
        for token in tokens[: len(pages) * size]:
            chain = link(chain, token)
        assert self.device.read(self.device.target, pages, len(pages) * size) == chain
        assert self.device.read(self.device.draft, pages, len(pages) * size) == chain

    def _check_tables(self) -> None:
        """The device's table is the host's, and 0 behind it, whoever had the slot before."""
        for sequence in self.scheduler.running:
            row = self.state.page_table[sequence.slot].tolist()
            assert row == sequence.pages + [0] * (len(row) - len(sequence.pages))

    def _check_order(self, plan: StepPlan) -> None:
        """Nobody is passed by a later arrival, and the oldest request runs in every step that can carry it further."""
        running = {s.slot: s for s in self.scheduler.running}
        admitted = [running[a.slot].request.request_id for a in plan.admits]
        self.admitted += admitted
        left = self.requests.keys() - self.finished.keys() - {s.request.request_id for s in running.values()}
        assert not admitted or not left or max(admitted) < min(left), 'a later arrival was admitted first'
        for admit in plan.admits:
            tokens = running[admit.slot].tokens
            assert admit.length < len(tokens), 'a hit leaves no token to compute'
            assert admit.length % self.config.page_size == 0
        for slot in plan.decodes:
            sequence = running[slot]
            assert sequence.length + sequence.steps_in_flight < sequence.end, 'what is in flight ends it already'
        oldest = self.scheduler.running[0]
        runs = {*plan.decodes, *(c.slot for c in plan.chunks)}
        ends = oldest.length + oldest.steps_in_flight >= oldest.end - 1
        assert oldest.slot in runs or ends, 'the oldest request does not run'
