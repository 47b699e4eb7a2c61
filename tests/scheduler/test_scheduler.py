"""The scheduler's decisions one by one: who runs, with how many rows, in which pages."""

import dataclasses
from typing import Any

import pytest

from specdec.messages import EngineRequest, SamplingParams
from specdec.plan import NO_STAGE, PageUpdate, SlotResult, Stage, StepPlan, StepResult
from specdec.scheduler.scheduler import Scheduler, SchedulerConfig
from tests.helpers.simulated_device import Host

CONFIG = SchedulerConfig(
    max_batch_size=3,
    max_prefill_tokens=8,
    session_len=32,
    num_drafts=3,
    num_pages=33,
    page_size=4,
    prefix_caching=True,
)


def make(**changes: Any) -> Scheduler:
    return Scheduler(dataclasses.replace(CONFIG, **changes))


def make_host(accepted: int = 0, **changes: Any) -> Host:
    return Host(dataclasses.replace(CONFIG, **changes), lambda: accepted)


def add(scheduler: Scheduler, request_id: int, length: int, new: int = 10, first: int = 0, **params: Any) -> None:
    prompt = tuple(range(first, first + length))
    scheduler.add(EngineRequest(request_id, prompt, SamplingParams(new, **params)))


def launch(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def answer(scheduler: Scheduler, plan: StepPlan, *tokens: tuple[int, ...], finish: str | None = None) -> None:
    slots = [c.slot for c in plan.chunks if c.final] + list(plan.decodes)
    results = (SlotResult(s, t, len(t) - 1, finish) for s, t in zip(slots, tokens, strict=True))
    scheduler.commit(StepResult(plan.step, tuple(results)))


def test_nothing_to_do() -> None:
    scheduler = make()
    assert scheduler.schedule() is None
    assert not scheduler.has_work()
    scheduler.check()


def test_a_prompt_is_cut_into_chunks_and_its_end_is_final() -> None:
    scheduler = make()
    add(scheduler, 1, 19)
    chunks = []
    for _ in range(3):
        plan = launch(scheduler)
        chunks += plan.chunks
        answer(scheduler, plan, *([(50,)] if plan.chunks[0].final else []))
    assert [(c.start, len(c.token_ids), c.final) for c in chunks] == [(0, 8, False), (8, 8, False), (16, 3, True)]
    assert [i for c in chunks for i in c.token_ids] == list(range(19))
    assert launch(scheduler).decodes == (chunks[0].slot,)


def test_chunks_share_the_budget_in_order_of_arrival_and_final_ones_come_last() -> None:
    scheduler = make()
    for request_id, length in ((1, 3), (2, 4), (3, 6)):
        add(scheduler, request_id, length, first=10 * request_id)
    plan = launch(scheduler)
    assert [(c.token_ids[0], len(c.token_ids), c.final) for c in plan.chunks] == [
        (30, 1, False),
        (10, 3, True),
        (20, 4, True),
    ]
    assert plan.num_absorbing == 1


def test_chunks_and_decodes_share_a_step() -> None:
    scheduler = make()
    add(scheduler, 1, 3)
    answer(scheduler, launch(scheduler), (50,))
    add(scheduler, 2, 20, first=40)
    plan = launch(scheduler)
    assert len(plan.decodes) == 1
    assert len(plan.chunks) == 1
    assert plan.row_bound == 4
    assert plan.num_drafting == 1


def test_admission_waits_for_a_slot() -> None:
    scheduler = make(max_batch_size=1)
    add(scheduler, 1, 2, new=1)
    add(scheduler, 2, 2)
    plan = launch(scheduler)
    assert len(plan.admits) == 1
    answer(scheduler, plan, (50,), finish='length')
    assert launch(scheduler).admits[0].slot == plan.admits[0].slot


def test_admit_says_where_a_request_ends_and_from_where_it_may_stop() -> None:
    scheduler = make()
    add(scheduler, 1, 5, new=7, min_new_tokens=2)
    add(scheduler, 2, 2, new=1000, first=20)
    admits = launch(scheduler).admits
    assert [(a.length, a.end, a.stop_from) for a in admits] == [(0, 12, 7), (0, 32, 2)]
    assert 0 not in {a.slot for a in admits}


def test_a_request_for_one_token_never_decodes() -> None:
    host = make_host()
    host.add([1, 2, 3], SamplingParams(1))
    host.drain()
    assert len(host.plans) == 1


SAMPLED, FILTERED = Stage.NOISE, Stage.NOISE | Stage.FILTERS


@pytest.mark.parametrize(
    ('params', 'stages', 'top_k'),
    [
        ({}, NO_STAGE, 0),
        ({'temperature': 1.0}, SAMPLED, 0),
        ({'top_k': 5}, NO_STAGE, 0),
        ({'temperature': 1.0, 'top_k': 5}, FILTERED, 5),
        ({'temperature': 1.0, 'top_p': 0.9}, FILTERED, 0),
        ({'temperature': 1.0, 'min_p': 0.1}, FILTERED, 0),
        ({'banned_ids': (3,)}, Stage.BANS, 0),
        ({'min_new_tokens': 1}, Stage.BANS, 0),
        ({'bad_words': ((3, 4),)}, Stage.WORDS, 0),
        ({'logit_bias': ((3, 1.0),)}, Stage.BIAS, 0),
        ({'repetition_penalty': 1.1}, Stage.PENALTIES, 0),
        ({'presence_penalty': 1.0}, Stage.PENALTIES, 0),
        ({'frequency_penalty': -1.0}, Stage.PENALTIES, 0),
        ({'allowed_ids': (3,)}, Stage.MASKS, 0),
        ({'grammar': '{}'}, Stage.MASKS, 0),
        ({'thinking_budget': 4}, Stage.THINKING, 0),
        ({'draft_sampling': 'coupled'}, NO_STAGE, 0),
        ({'temperature': 1.0, 'draft_sampling': 'coupled'}, SAMPLED | Stage.DRAFT_NOISE, 0),
        (
            {'temperature': 1.0, 'draft_sampling': 'probabilistic'},
            SAMPLED | Stage.DRAFT_NOISE | Stage.RATIO,
            0,
        ),
    ],
)
def test_the_plan_names_the_stages_that_somebody_needs(params: dict[str, Any], stages: Stage, top_k: int) -> None:
    scheduler = make()
    add(scheduler, 1, 3)
    add(scheduler, 2, 3, first=20, **params)
    plan = launch(scheduler)
    assert (plan.stages, plan.top_k) == (stages, top_k)
    assert len(plan.grammars) == ('grammar' in params)


@pytest.mark.parametrize(('logprobs', 'most'), [((None, None), None), ((None, 0), 0), ((2, 4), 4)])
def test_the_plan_asks_for_as_many_alternatives_as_anybody(logprobs: tuple[Any, Any], most: int | None) -> None:
    scheduler = make()
    for i, count in enumerate(logprobs):
        add(scheduler, 1 + i, 3, first=20 * i, logprobs=count)
    assert launch(scheduler).logprobs == most


def test_stages_of_a_prompt_that_is_not_finished_do_not_count() -> None:
    scheduler = make()
    add(scheduler, 1, 20, temperature=1.0, top_k=5, logprobs=3)
    plan = launch(scheduler)
    assert (plan.stages, plan.logprobs, plan.num_drafting) == (NO_STAGE, None, 0)


@pytest.mark.parametrize(
    ('caps', 'rows', 'drafting'), [((None, None), 8, 2), ((0, 2), 4, 1), ((0, 0), 2, 0), ((9, 1), 6, 2)]
)
def test_caps_bound_rows_and_drafting(caps: tuple[int | None, ...], rows: int, drafting: int) -> None:
    scheduler = make()
    for i, cap in enumerate(caps):
        add(scheduler, i + 1, 3, first=20 * i, max_drafts=cap)
    answer(scheduler, launch(scheduler), (50,), (50,))
    plan = launch(scheduler)
    assert (plan.row_bound, plan.num_drafting) == (rows, drafting)


# --------------------------------------------------------------------------------------------------- prefix hits
@pytest.mark.parametrize(('length', 'cached'), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (10, 8)])
def test_a_hit_covers_full_pages_and_leaves_one_token(length: int, cached: int) -> None:
    scheduler = make(max_prefill_tokens=32)
    add(scheduler, 1, 12)
    answer(scheduler, launch(scheduler), (50,), finish='stop')
    add(scheduler, 2, length)
    plan = launch(scheduler)
    assert plan.admits[0].length == cached
    assert plan.chunks[0].start == cached
    assert scheduler.stats.cached_tokens == cached
    answer(scheduler, plan, (50,), finish='stop')
    scheduler.check()


def test_a_hit_on_a_running_request_shares_its_pages() -> None:
    scheduler = make(max_prefill_tokens=32)
    add(scheduler, 1, 10)
    first = launch(scheduler)
    answer(scheduler, first, (50,))
    add(scheduler, 2, 10)
    second = launch(scheduler)
    shared = first.page_updates[0].pages[:2]
    assert second.page_updates[0] == PageUpdate(second.admits[0].slot, 0, shared)
    own = {p for u in second.page_updates[1:] for p in u.pages}
    assert not own & set(first.page_updates[0].pages)


def test_chunks_in_flight_are_shared_with_steps_launched_later() -> None:
    scheduler = make(overlap=1)
    add(scheduler, 1, 8)
    launch(scheduler)
    add(scheduler, 2, 8)
    assert launch(scheduler).admits[0].length == 4


def test_requests_of_one_step_do_not_share() -> None:
    scheduler = make(max_prefill_tokens=32)
    add(scheduler, 1, 10)
    add(scheduler, 2, 10)
    assert [a.length for a in launch(scheduler).admits] == [0, 0]


def test_the_anchor_is_not_shared() -> None:
    """3 prompt tokens and one drawn fill a page, but the drawn one was never run through the target."""
    scheduler = make()
    add(scheduler, 1, 3)
    answer(scheduler, launch(scheduler), (3,))
    add(scheduler, 2, 5)
    plan = launch(scheduler)
    assert plan.admits[0].length == 0
    answer(scheduler, plan, (5,), (4,))
    add(scheduler, 3, 5)
    assert launch(scheduler).admits[0].length == 4, 'once it is committed, it is'


def test_a_finished_text_as_a_prompt() -> None:
    host = make_host(accepted=3, session_len=64)
    first = host.add([7, 7, 8], SamplingParams(13))
    host.drain()
    text = [7, 7, 8, *host.texts[first]]
    assert len(text) % 4 == 0
    host.add(text, SamplingParams(5))
    host.drain()
    assert host.plans[-1].step > 1
    assert [a.length for p in host.plans for a in p.admits] == [0, len(text) - 4]


# ---------------------------------------------------------------------------------------------------- preemption
def start_two(overlap: int = 0, **changes: Any) -> Host:
    """Two requests in a pool too small for both to end."""
    host = make_host(num_pages=8, session_len=28, num_drafts=1, max_prefill_tokens=16, overlap=overlap, **changes)
    host.add([1, 2, 3, 4, 5], SamplingParams(20))
    host.add([11, 12, 13, 14, 15], SamplingParams(20))
    return host


@pytest.mark.parametrize('overlap', [0, 1])
def test_the_later_arrival_gives_way_and_returns_with_its_output(overlap: int) -> None:
    host = start_two(overlap)
    while host.scheduler.stats.preemptions == 0:
        host.step()
    [victim] = [r for r in host.requests if not any(s.request.request_id == r for s in host.scheduler.running)]
    assert victim == 2
    told = len(host.texts[2])
    host.drain()
    again = [p for p in host.plans if p.admits][-1]
    chunk = next(c for c in again.chunks if c.slot == again.admits[-1].slot)
    total = again.admits[-1].length + len(chunk.token_ids)
    assert total >= 5 + told, 'prompt and output, anchor included'
    tokens = [11, 12, 13, 14, 15, *host.texts[2]]
    assert list(chunk.token_ids) == tokens[chunk.start : total]


def test_a_preempted_request_loses_no_place() -> None:
    host = start_two()
    while host.scheduler.stats.preemptions == 0:
        host.step()
    host.add([21, 22], SamplingParams(2))
    host.drain()
    assert host.admitted == [1, 2, 2, 3]


def test_a_preempted_request_waits_for_its_step_before_anyone_is_admitted() -> None:
    """Its pages must not go to a later arrival while the step that it lost them in is still in flight."""
    host = start_two(overlap=1)
    while host.scheduler.stats.preemptions == 0:
        if not host.can_launch:
            host.read()
        if host.scheduler.stats.preemptions == 0 and len(host.requests) < 3:
            host.add([21, 22], SamplingParams(2))
        host.launch()
    assert not host.plans[-1].admits
    host.drain()


def test_counts_and_prompt_length_survive_preemption() -> None:
    host = start_two()
    host.drain()
    outputs = host.outputs[2]
    assert host.scheduler.stats.preemptions > 0
    assert host.scheduler.stats.prompt_tokens == 10
    firsts = [o for o in outputs if not o.decode]
    assert len(firsts) > 1, 'each recomputation draws a token at its end'
    assert all(o.drafted == 0 and len(o.token_ids) == 1 for o in firsts)


# --------------------------------------------------------------------------------------------------------- abort
@pytest.mark.parametrize('overlap', [0, 1])
def test_abort_at_every_stage(overlap: int) -> None:
    for steps in range(8):
        for target in (1, 2, 3):
            host = start_two(overlap)
            host.add([21, 22, 23], SamplingParams(6))
            for _ in range(steps):
                host.step()
            host.abort(target)
            host.abort(target)
            host.drain()


def test_aborting_the_unknown_is_no_error() -> None:
    assert make().abort([1, 2]) == []


def test_what_was_in_flight_for_an_aborted_request_is_dropped() -> None:
    scheduler = make(overlap=1)
    add(scheduler, 1, 3)
    plan = launch(scheduler)
    [output] = scheduler.abort([1])
    assert output.finish_reason == 'abort'
    assert scheduler.has_work(), 'its step is still to be read'
    assert scheduler.commit(StepResult(plan.step, (SlotResult(plan.chunks[0].slot, (5,), 0, None),))) == []
    scheduler.check()
    assert not scheduler.has_work()


# ------------------------------------------------------------------------------------------------------- overlap
def test_pages_reach_past_what_was_read() -> None:
    """K + 1 rows past the last length read; twice that where a step may be in flight."""
    for overlap, reach in ((0, 4), (1, 8)):
        scheduler = make(overlap=overlap, page_size=1, num_pages=64)
        add(scheduler, 1, 3)
        plans = [launch(scheduler)]
        if overlap:
            plans.append(launch(scheduler))
        answer(scheduler, plans[0], (50,))
        plans.append(launch(scheduler))
        assert sum(len(u.pages) for p in plans for u in p.page_updates) == 3 + reach


def test_a_step_in_flight_that_ends_a_request_is_not_followed_by_another() -> None:
    scheduler = make(overlap=1)
    add(scheduler, 1, 3, new=2)
    launch(scheduler)
    assert launch(scheduler).decodes
    assert scheduler.schedule() is None


def test_results_are_read_in_launch_order() -> None:
    scheduler = make(overlap=1)
    add(scheduler, 1, 3)
    launch(scheduler)
    second = launch(scheduler)
    with pytest.raises(AssertionError, match='launch order'):
        scheduler.commit(StepResult(second.step, ()))


def test_a_step_of_a_stopped_request_is_dropped() -> None:
    scheduler = make(overlap=1)
    add(scheduler, 1, 3)
    first, second = launch(scheduler), launch(scheduler)
    answer(scheduler, first, (50,), finish='stop')
    assert scheduler.commit(StepResult(second.step, (SlotResult(second.decodes[0], (1, 2), 1, None),))) == []
    scheduler.check()


# ---------------------------------------------------------------------------------------------- choices of one prompt
def follow(scheduler: Scheduler, request_id: int, length: int, after: int) -> None:
    scheduler.add(EngineRequest(request_id, tuple(range(length)), SamplingParams(10), after))


def test_choices_wait_for_the_first_ones_prompt_and_hit_its_pages() -> None:
    scheduler = make()
    add(scheduler, 1, 14)
    follow(scheduler, 2, 14, after=1)
    add(scheduler, 3, 3, first=50)
    first = launch(scheduler)  # eight tokens of 1; nothing is left for 3
    assert [c.slot for c in first.chunks] == [first.admits[0].slot]
    answer(scheduler, first)
    second = launch(scheduler)  # the end of 1's prompt, and 3 does not wait for 2
    assert [(a.length, len(a.prompt_ids)) for a in second.admits] == [(12, 14)] or len(second.admits) == 1
    assert scheduler.current_stats().num_waiting == 3 - len(scheduler.running)
    answer(scheduler, second, *[(1,)] * len([c for c in second.chunks if c.final]))
    third = launch(scheduler)
    admitted = {a.prompt_ids: a.length for a in (*second.admits, *third.admits)}
    assert admitted[tuple(range(14))] == 12


@pytest.mark.parametrize('caching', [True, False])
def test_choices_whose_first_one_is_gone_or_done_do_not_wait(caching: bool) -> None:
    scheduler = make(prefix_caching=caching)
    follow(scheduler, 1, 3, after=99)
    assert len(launch(scheduler).admits) == 1
    scheduler = make(prefix_caching=caching, max_batch_size=1)
    add(scheduler, 1, 20)
    answer(scheduler, launch(scheduler))
    follow(scheduler, 2, 20, after=1)
    follow(scheduler, 3, 20, after=1)
    assert scheduler.abort([3])[0].finish_reason == 'abort'
    assert scheduler.current_stats().num_waiting == 1
    scheduler.abort([1])
    plan = launch(scheduler)
    assert [a.length for a in plan.admits] == ([8] if caching else [0])
    scheduler.abort([2])
    answer(scheduler, plan)
    assert not scheduler.has_work()
    scheduler.check()


def test_the_record_of_a_preempted_request_tells_prompt_from_output() -> None:
    scheduler = make()
    add(scheduler, 1, 5)
    answer(scheduler, launch(scheduler), (7,))
    answer(scheduler, launch(scheduler), (8, 9))
    scheduler._preempt(scheduler.running[0])
    [admit] = launch(scheduler).admits
    assert (admit.prompt_ids, admit.output_ids) == ((0, 1, 2, 3, 4), (7, 8, 9))
