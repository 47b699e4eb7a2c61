"""Who runs in the next step, with how many rows, in which pages. Plain Python; it never touches a tensor.

The scheduler writes a StepPlan, later reads the StepResult of the same step, and may have written another plan in
between: the device runs ahead of what the host has read by at most `overlap` steps. Next: agent/model_agent.py, which
runs the plan.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from specdec.messages import EngineRequest, EngineStats, ErrorInfo, RequestOutput, SamplingParams
from specdec.plan import (
    NO_STAGE,
    Admit,
    Candidate,
    Chunk,
    LengthChoice,
    PageUpdate,
    Save,
    SlotResult,
    Stage,
    StepPlan,
    StepResult,
    stages_of,
)
from specdec.scheduler.lengths import EveryDraft, LengthPolicy
from specdec.scheduler.pages import PagePool
from specdec.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`num_drafts` is K. `overlap`: steps launched before the first of them is read (0 on CPU, 1 on CUDA).
    `num_states`: copies of slots at page boundaries, without which prefixes are of no use to a model that keeps state
    by slot; 0 for models that keep none.
    """

    max_batch_size: int
    max_prefill_tokens: int
    session_len: int
    num_drafts: int
    num_pages: int
    page_size: int
    prefix_caching: bool
    overlap: int = 0
    num_states: int = 0


@dataclass(slots=True)
class SchedulerStats:
    """Running totals since the start."""

    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Scheduler:
    def __init__(self, config: SchedulerConfig, lengths: LengthPolicy | None = None) -> None:
        self.config = config
        self.lengths = lengths or EveryDraft()
        self.choice = LengthChoice(None, False)  # of the latest step
        self.pages = PagePool(config.num_pages, config.page_size, config.prefix_caching, config.num_states)
        self.stats = SchedulerStats()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival: the last one is preempted first
        self._by_id: dict[int, Sequence] = {}
        self._order: dict[int, int] = {}  # request id -> arrival, so that a preempted request returns to its place
        self._arrivals = 0
        self._free_slots = list(range(config.max_batch_size, 0, -1))
        self._in_flight: deque[_Launched] = deque()
        self._followers: dict[int, list[Sequence]] = {}  # by the request whose prompt they wait for
        self._paused: list[Sequence] = []  # preempted with a step in flight; re-queued when it is read
        self._step = 0

    # ------------------------------------------------------------------------------------------------- requests
    def knows(self, request_id: int) -> bool:
        """Whether a request of this id waits or runs."""
        return request_id in self._by_id

    def add(self, request: EngineRequest) -> None:
        """Queue a request whose prompt was checked: 1 <= len(prompt_ids) < session_len."""
        prompt_length = len(request.prompt_ids)
        asked = request.params.max_drafts
        max_drafts = self.config.num_drafts if asked is None else min(asked, self.config.num_drafts)
        sequence = Sequence(
            request=request,
            end=min(prompt_length + request.params.max_new_tokens, self.config.session_len),
            max_drafts=max_drafts,
            stages=stages_of(request.params, max_drafts > 0),
            tokens=list(request.prompt_ids),
            prefill_end=prompt_length,
        )
        self._arrivals += 1
        self._order[request.request_id] = self._arrivals
        self._by_id[request.request_id] = sequence
        self.stats.prompt_tokens += prompt_length
        leader = self._by_id.get(request.after) if request.after is not None else None
        if leader is not None and leader.computes_prompt and self.config.prefix_caching:
            self._followers.setdefault(leader.request.request_id, []).append(sequence)
        else:
            self.waiting.append(sequence)

    def _release_followers(self, leader: Sequence) -> None:
        """Who waited for its prompt takes the place in the queue that his arrival gives him."""
        for follower in self._followers.pop(leader.request.request_id, ()):
            self._insert(self.waiting, follower)

    def abort(self, request_ids: Iterable[int]) -> list[RequestOutput]:
        """Drop requests at once; a step still computing for them is discarded when read. Unknown ids are no error."""
        outputs = []
        for request_id in request_ids:
            sequence = self._by_id.get(request_id)
            if sequence is not None:
                self._finish(sequence)
                outputs.append(RequestOutput(request_id, finish_reason='abort'))
        return outputs

    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._in_flight or self._paused)

    def current_stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self._paused) + sum(map(len, self._followers.values())),
            num_free_slots=len(self._free_slots),
            num_pages=self.pages.num_pages - 1,
            num_pages_held=self.pages.num_held,
            num_steps=self._step,
            num_preemptions=self.stats.preemptions,
            draft_budget=self.choice.budget,
            drafting=self.choice.drafting,
        )

    def check(self) -> None:
        """Page accounting, whenever the engine is idle."""
        self.pages.check()
        if not self.has_work():
            assert self.pages.num_held == 0, 'an idle engine holds pages'
            assert len(self._free_slots) == self.config.max_batch_size, 'an idle engine holds slots'

    # --------------------------------------------------------------------------------------------------- a plan
    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can run before another result is read."""
        draft = _Draft()
        self._plan_decodes(draft)
        self._plan_chunks(draft)
        if not draft.decodes and not draft.chunks:
            return None
        return self._launch(draft)

    def _plan_decodes(self, draft: '_Draft') -> None:
        for sequence in list(self.running):
            if not sequence.slot or sequence.prefilling:
                continue
            if sequence.length + sequence.steps_in_flight >= sequence.end - 1:
                continue  # every step emits a token, so what is in flight ends it
            if self._reserve(draft, sequence):
                draft.decodes.append(sequence)

    def _reserve(self, draft: '_Draft', sequence: Sequence) -> bool:
        """Pages for every row that this step could commit or reject, preempting later arrivals if need be."""
        rows = (sequence.steps_in_flight + 1) * (1 + sequence.max_drafts)
        needed = self.pages.pages_for(min(sequence.length + rows, sequence.end)) - len(sequence.pages)
        while needed > self.pages.num_available:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        self._extend(draft, sequence, needed)
        return True

    def _extend(self, draft: '_Draft', sequence: Sequence, count: int) -> None:
        if count > 0:
            pages = self.pages.take(count)
            draft.page_updates.append(PageUpdate(sequence.slot, len(sequence.pages), tuple(pages)))
            sequence.pages += pages

    def _plan_chunks(self, draft: '_Draft') -> None:
        budget = self.config.max_prefill_tokens
        for sequence in self.running:
            if sequence.prefilling and budget > 0:
                budget -= self._plan_chunk(draft, sequence, budget)
        # a paused request returns to the queue once its step is read: no later arrival may have its pages before
        while budget > 0 and self.waiting and self._free_slots and not self._paused:
            sequence = self.waiting[0]
            if not self._admit(draft, sequence):
                break
            self.waiting.popleft()
            budget -= self._plan_chunk(draft, sequence, budget)

    def _plan_chunk(self, draft: '_Draft', sequence: Sequence, budget: int) -> int:
        start, stop = sequence.launched, min(sequence.launched + budget, sequence.prefill_end)
        stop = next((b for b in self._boundaries(sequence) if start < b < stop), stop)
        draft.chunks.append((sequence, start, stop))
        return stop - start

    def _boundaries(self, sequence: Sequence) -> tuple[int, ...]:
        """Where the state of a prompt is worth a copy, ascending: at a branch, and as far as a hit can reach."""
        if not self.pages.states.num_states:
            return ()
        size = self.config.page_size
        return sequence.branch, (sequence.prefill_end - 1) // size * size

    def _admit(self, draft: '_Draft', sequence: Sequence) -> bool:
        """Give a waiting sequence a slot, its cached prefix and pages for the rest; only if nobody has to leave."""
        tokens = sequence.tokens
        found = self.pages.match(tokens)
        hit = self.pages.with_state(found)
        # what its first decode steps will reserve, so that a newcomer is not preempted right after its prompt
        rows = (self.config.overlap + 1) * (1 + sequence.max_drafts)
        needed = self.pages.pages_for(min(len(tokens) + rows, sequence.end)) - len(hit)
        self.pages.hold(hit)
        if needed > self.pages.num_available:
            self.pages.release(hit)
            return False
        cached = len(hit) * self.config.page_size
        sequence.slot = self._free_slots.pop()
        sequence.pages, sequence.published, sequence.key_id = list(hit), len(hit), self.pages.key_after(hit)
        sequence.launched = sequence.length = cached
        sequence.branch = len(found) * self.config.page_size if len(found) > len(hit) else 0
        sequence.prefill_end = len(tokens)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = cached
            self.stats.cached_tokens += cached
        draft.admits.append(self._admit_record(sequence, cached))
        if hit:
            draft.page_updates.append(PageUpdate(sequence.slot, 0, tuple(hit)))
        self._extend(draft, sequence, needed)
        self._insert(self.running, sequence)
        return True

    def _admit_record(self, sequence: Sequence, cached: int) -> Admit:
        request = sequence.request
        return Admit(
            slot=sequence.slot,
            length=cached,
            end=sequence.end,
            stop_from=sequence.prompt_length + request.params.device_min_tokens,
            params=request.params,
            stages=sequence.stages,
            prompt_ids=request.prompt_ids,
            output_ids=tuple(sequence.tokens[sequence.prompt_length :]),
            state=self.pages.states.find(sequence.key_id),
        )

    def _launch(self, draft: '_Draft') -> StepPlan:
        """Turn the draft into a plan and note what the host now knows to be under way."""
        unfinished = [c for c in draft.chunks if c[2] < c[0].prefill_end]
        final = [c for c in draft.chunks if c[2] == c[0].prefill_end]
        sampling = [c[0] for c in final] + draft.decodes
        chunks = tuple(
            Chunk(s.slot, start, tuple(s.tokens[start:stop]), stop == s.prefill_end)
            for s, start, stop in unfinished + final
        )
        saves = []
        for sequence, _, stop in draft.chunks:
            sequence.launched = sequence.length = stop
            self._publish(sequence)  # steps launched later run later, so they may already read these pages
            if stop in self._boundaries(sequence) and not self.pages.states.has(sequence.key_id):
                saves.append(Save(sequence.slot, stop, self.pages.states.take(sequence.key_id)))
            if not sequence.prefilling:
                self._release_followers(sequence)
        choice = self._choose_lengths(draft, [c[0] for c in final])
        for sequence in draft.decodes:
            sequence.steps_in_flight += 1
        for sequence in sampling:
            sequence.has_drafts = choice.drafting and sequence.max_drafts > 0
        self._step += 1
        self._in_flight.append(_Launched(self._step, sampling, len(final)))
        everyone = [c[0] for c in unfinished] + sampling
        params = [s.request.params for s in sampling]
        stages = NO_STAGE
        for sequence in sampling:
            stages |= sequence.stages
        return StepPlan(
            step=self._step,
            admits=tuple(draft.admits),
            page_updates=tuple(draft.page_updates),
            chunks=chunks,
            decodes=tuple(s.slot for s in draft.decodes),
            row_bound=self._row_bound(draft, choice),
            table_width=max(len(s.pages) for s in everyone),
            num_drafting=sum(s.has_drafts for s in sampling),
            stages=stages,
            top_k=_top_k_bound(sampling) if Stage.FILTERS in stages else 0,
            grammars=tuple(s.slot for s in sampling if s.request.params.grammar) if Stage.MASKS in stages else (),
            logprobs=max((p.logprobs for p in params if p.logprobs is not None), default=None),
            saves=tuple(saves),
            draft_budget=choice.budget,
        )

    def _choose_lengths(self, draft: '_Draft', joining: list[Sequence]) -> LengthChoice:
        """How many drafted rows this step has and whether it drafts; before `steps_in_flight` counts it."""
        decodes = [Candidate(self._available(s), s.max_drafts) for s in draft.decodes]
        newcomers = [Candidate(0, s.max_drafts) for s in joining]
        other_rows = sum(stop - start for _, start, stop in draft.chunks)
        self.choice = self.lengths.choose(decodes, newcomers, other_rows)
        return self.choice

    def _available(self, sequence: Sequence) -> int:
        """A bound on its drafts in the next step: the device knows how far the steps in flight will have come."""
        room = sequence.end - 2 - sequence.length - sequence.steps_in_flight
        return max(min(sequence.max_drafts, room), 0) if sequence.has_drafts else 0

    def _row_bound(self, draft: '_Draft', choice: LengthChoice) -> int:
        if choice.budget is None:
            return sum(1 + s.max_drafts for s in draft.decodes)
        return len(draft.decodes) + choice.budget

    # ------------------------------------------------------------------------------------------------- a result
    def commit(self, result: StepResult) -> list[RequestOutput]:
        """Read the oldest launched step: append tokens, publish pages, finish requests."""
        launched = self._in_flight.popleft()
        assert launched.step == result.step, 'results are read in launch order'
        outputs = [
            self._commit_one(sequence, slot_result, decode=i >= launched.num_final)
            for i, (sequence, slot_result) in enumerate(zip(launched.sequences, result.slots, strict=True))
            if not sequence.finished
        ]
        paused, self._paused = self._paused, []
        for sequence in paused:
            if not sequence.finished:
                self._requeue_when_read(sequence)
        return outputs

    def _commit_one(self, sequence: Sequence, result: SlotResult, decode: bool) -> RequestOutput:
        sequence.steps_in_flight -= decode
        sequence.tokens += result.token_ids
        self._learn(sequence, result)
        if sequence.slot:
            sequence.length = len(sequence.tokens) - 1  # the last one is the anchor
            self._publish(sequence)
        if result.finish is not None:
            self._finish(sequence)
        cached = 0 if decode else sequence.cached_tokens or 0
        return RequestOutput(
            request_id=sequence.request.request_id,
            token_ids=result.token_ids,
            finish_reason=result.finish,
            decode=decode,
            drafted=result.drafted,
            cached_tokens=cached,
            logprobs=_wanted(result, sequence.request.params.logprobs),
            error=_stuck(sequence.request.params) if result.finish == 'error' else None,
        )

    def _learn(self, sequence: Sequence, result: SlotResult) -> None:
        """What became of its block, unless a stop or a limit cut it short, and the survivals of the next one."""
        if result.drafted and sequence.survival is not None and result.finish is None:
            self.lengths.observe(sequence.survival, result.drafted, len(result.token_ids) - 1)
        if result.survival is not None:
            sequence.survival = result.survival
            self.lengths.report(result.survival)

    def _publish(self, sequence: Sequence) -> None:
        """Full pages of committed tokens become findable; the anchor is not committed, so its page waits."""
        size = self.config.page_size
        while (sequence.published + 1) * size <= sequence.length:
            start = sequence.published * size
            tokens = tuple(sequence.tokens[start : start + size])
            sequence.key_id = self.pages.publish(sequence.key_id, tokens, sequence.pages[sequence.published])
            sequence.published += 1

    def _finish(self, sequence: Sequence) -> None:
        """Return everything the sequence holds; later steps on the same stream may use it at once."""
        sequence.finished = True
        del self._by_id[sequence.request.request_id], self._order[sequence.request.request_id]
        if sequence.slot:
            self._let_go(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        elif (followers := self._followers.get(sequence.request.after)) is not None and sequence in followers:
            followers.remove(sequence)
        self._release_followers(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        self.pages.release(sequence.pages)
        self._free_slots.append(sequence.slot)
        self.running.remove(sequence)
        sequence.pages, sequence.slot = [], 0

    # ----------------------------------------------------------------------------------------------- preemption
    def _preempt(self, sequence: Sequence) -> None:
        """Take back slot and pages; everything emitted, the anchor too, becomes its prompt when it returns."""
        self.stats.preemptions += 1
        self._let_go(sequence)
        self._requeue_when_read(sequence)

    def _requeue_when_read(self, sequence: Sequence) -> None:
        if any(sequence in launched.sequences for launched in self._in_flight):
            self._paused.append(sequence)
            return
        sequence.launched = sequence.length = sequence.steps_in_flight = sequence.published = 0
        sequence.has_drafts = False
        sequence.survival = None
        sequence.prefill_end = len(sequence.tokens)
        self._insert(self.waiting, sequence)

    def _insert(self, queue: 'deque[Sequence] | list[Sequence]', sequence: Sequence) -> None:
        """Keep arrival order."""
        order = self._order[sequence.request.request_id]
        index = len(queue)
        while index and self._order[queue[index - 1].request.request_id] > order:
            index -= 1
        queue.insert(index, sequence)


def _top_k_bound(sequences: Iterable[Sequence]) -> int:
    """The largest top_k of those that filter, 0 if one of them has none."""
    bounds = [s.request.params.top_k for s in sequences if Stage.FILTERS in s.stages]
    return max(bounds) if all(bounds) else 0


def _stuck(params: SamplingParams) -> ErrorInfo:
    """What to say of a request whose rules together left no token."""
    rules = {
        'response_format': params.grammar is not None,
        'allowed_token_ids': bool(params.allowed_ids),
        'bad_words, bad_token_ids or ignore_eos': bool(params.banned_ids),
        'bad_words': bool(params.bad_words) and not params.banned_ids,
        'min_new_tokens': params.min_new_tokens > 0,
        'thinking_budget': params.thinking_budget is not None,
    }
    names = ' and '.join(name for name, acts in rules.items() if acts)
    if not names:
        return ErrorInfo('no_token_allowed', 'the model gave no token a finite score; relax penalties and logit_bias')
    return ErrorInfo('no_token_allowed', f'no token is left that {names} would allow; relax one of them')


def _wanted(result: SlotResult, alternatives: int | None) -> tuple[dict[int, float], ...] | None:
    """A request's own share of log-probabilities; the step computed as many alternatives as anybody asked for."""
    if alternatives is None or result.logprobs is None:
        return None
    return tuple(_best(entry, alternatives) for entry in result.logprobs)


def _best(entry: dict[int, float], count: int) -> dict[int, float]:
    """The first entry, the emitted token's, and the `count` best, which may include it."""
    own, *others = entry.items()
    better = sum(value > own[1] for _, value in others)
    return dict([own, *others[: count - (better < count)]]) if count else dict([own])


@dataclass(slots=True)
class _Draft:
    """A plan being written: sequences instead of slots."""

    admits: list[Admit] = field(default_factory=list)
    page_updates: list[PageUpdate] = field(default_factory=list)
    chunks: list[tuple[Sequence, int, int]] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that was launched and not read: the sequences that draw tokens in it, those ending their prompt first."""

    step: int
    sequences: list[Sequence]
    num_final: int
