"""Copies of slots at page boundaries: where they are made, who finds them, and when they go."""

import pytest

from specdec.messages import SamplingParams
from specdec.scheduler.scheduler import SchedulerConfig
from specdec.scheduler.states import StatePool
from tests.helpers.simulated_device import Host, random_accept

PAGE = 4


def host(num_states: int, **changes) -> Host:
    settings = {
        'max_batch_size': 2,
        'max_prefill_tokens': 100,
        'session_len': 60,
        'num_drafts': 2,
        'num_pages': 40,
        'page_size': PAGE,
        'prefix_caching': True,
        'num_states': num_states,
    }
    return Host(SchedulerConfig(**settings | changes), random_accept(0, 2))


def run(host: Host, prompt: list[int], new_tokens: int = 3) -> int | None:
    """A request to its end -> the tokens that it found cached."""
    request_id = host.add(prompt, SamplingParams(new_tokens))
    host.drain()
    return host.outputs[request_id][0].cached_tokens


def saves(host: Host) -> list[int]:
    return [save.length for plan in host.plans for save in plan.saves]


TEXT = list(range(30))


@pytest.mark.parametrize(('length', 'boundary'), [(1, None), (4, None), (5, 4), (8, 4), (9, 8), (14, 12)])
def test_a_prompt_leaves_a_copy_as_far_as_a_hit_can_reach(length: int, boundary: int | None):
    device = host(5)
    run(device, TEXT[:length])
    assert saves(device) == ([] if boundary is None else [boundary])
    assert run(device, TEXT[:length]) == (boundary or 0)


def test_a_branch_leaves_a_copy_for_the_next_one():
    """Pages match farther than any copy: the first to branch off there pays, those after it do not."""
    device = host(5)
    run(device, TEXT[:17])
    assert run(device, [*TEXT[:10], 49, 48, 47]) == 0  # pages of 8 tokens, but the only copy is at 16
    assert saves(device) == [16, 8, 12]
    assert run(device, [*TEXT[:10], 46, 45]) == 8


def test_without_state_by_slot_pages_are_enough():
    device = host(0)
    run(device, TEXT[:17])
    assert run(device, [*TEXT[:10], 49, 48, 47]) == 8
    assert saves(device) == []


def test_a_copy_goes_with_its_page():
    device = host(9, num_pages=9, session_len=24)
    run(device, TEXT[:17])
    run(device, [40 + i % 9 for i in range(20)])
    run(device, [31 + i % 7 for i in range(20)])
    assert len(device.scheduler.pages.states) <= 2
    assert run(device, TEXT[:17]) == 0


def test_the_least_recently_used_copy_goes_first():
    pool = StatePool(2)
    first, second = pool.take(10), pool.take(20)
    assert pool.find(10) == first
    assert pool.take(30) == second
    assert (pool.find(20), pool.find(10)) == (0, first)
    pool.drop(10)
    pool.drop(99)
    pool.check()
    assert pool.take(40) == first
