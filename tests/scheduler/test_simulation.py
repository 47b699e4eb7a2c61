"""The scheduler against a simulated device: any order of arrivals, steps, late reads, stops, aborts and preemptions.

The device checks every row's context and the host every rule of the page accounting (tests/helpers/simulated_device).
"""

import random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specdec.messages import SamplingParams
from specdec.scheduler.scheduler import SchedulerConfig
from tests.helpers.simulated_device import Host, random_accept

# prompts share prefixes; one starts with what stands in the middle of another, one repeats itself
STEMS = [
    [(7 * i * i + 3 * i) % 50 for i in range(40)],
    [(5 * i * i + i + 1) % 50 for i in range(40)],
    [9, 8, 9, 8] * 10,
]
STEMS.append(STEMS[0][4:])


class Serving(RuleBasedStateMachine):
    host: Host

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        pages=st.integers(6, 14),
        drafts=st.integers(0, 4),
        batch=st.integers(1, 4),
        prefill=st.integers(1, 9),
        caching=st.booleans(),
        overlap=st.integers(0, 1),
        seed=st.integers(0, 1000),
        states=st.integers(0, 4),
    )
    def start(
        self,
        page_size: int,
        pages: int,
        drafts: int,
        batch: int,
        prefill: int,
        caching: bool,
        overlap: int,
        seed: int,
        states: int,
    ) -> None:
        config = SchedulerConfig(
            max_batch_size=batch,
            max_prefill_tokens=prefill,
            session_len=min(pages * page_size, 30),
            num_drafts=drafts,
            num_pages=pages + 1,
            page_size=page_size,
            prefix_caching=caching,
            overlap=overlap,
            num_states=states,
        )
        self.host = Host(config, random_accept(seed, drafts))

    @precondition(lambda self: len(self.host.requests) < 25)
    @rule(
        stem=st.integers(0, len(STEMS) - 1),
        length=st.integers(1, 29),
        new=st.integers(1, 30),
        cap=st.sampled_from([None, 0, 1]),
        stops=st.lists(st.integers(0, 49), max_size=6),
        minimum=st.integers(0, 3),
    )
    def arrive(self, stem: int, length: int, new: int, cap: int | None, stops: list[int], minimum: int) -> None:
        length = min(length, self.host.config.session_len - 1)
        self.host.add(STEMS[stem][:length], SamplingParams(new, minimum, stop_ids=tuple(stops), max_drafts=cap))

    @precondition(lambda self: any(self.host.texts.values()))
    @rule(pick=st.integers(0, 24), new=st.integers(1, 9), cut=st.integers(0, 2))
    def continue_a_text(self, pick: int, new: int, cut: int) -> None:
        """Prompt with what an earlier request produced, finished or not: the most a prefix hit can cover."""
        told = [r for r, text in self.host.texts.items() if text]
        request_id = told[pick % len(told)]
        text = [*self.host.requests[request_id].prompt_ids, *self.host.texts[request_id]]
        text = text[: max(1, min(len(text) - cut, self.host.config.session_len - 1))]
        self.host.add(text, SamplingParams(new))

    @precondition(lambda self: self.host.can_launch)
    @rule()
    def launch(self) -> None:
        self.host.launch()

    @precondition(lambda self: self.host.unread)
    @rule()
    def read(self) -> None:
        self.host.read()

    @rule(turns=st.integers(1, 6))
    def loop(self, turns: int) -> None:
        for _ in range(turns):
            self.host.step()

    @precondition(lambda self: self.host.requests)
    @rule(pick=st.integers(0, 24))
    def abort(self, pick: int) -> None:
        self.host.abort(1 + pick % len(self.host.requests))

    @invariant()
    def unread_steps_are_bounded(self) -> None:
        assert len(self.host.unread) <= self.host.config.overlap + 1

    def teardown(self) -> None:
        if 'host' in vars(self):
            self.host.drain()


TestServing = Serving.TestCase
TestServing.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),  # shrinking a failure takes minutes; add it while looking for one
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


@pytest.mark.parametrize('overlap', [0, 1])
@pytest.mark.parametrize('caching', [False, True])
@pytest.mark.parametrize(('seed', 'states'), [(0, 0), (1, 0), (2, 0), (0, 3), (1, 9)])
def test_a_tiny_pool_preempts_much_and_loses_nothing(seed: int, states: int, caching: bool, overlap: int) -> None:
    rng = random.Random(seed)
    config = SchedulerConfig(
        max_batch_size=6,
        max_prefill_tokens=rng.choice([3, 16]),
        session_len=48,
        num_drafts=3,
        num_pages=14,
        page_size=4,
        prefix_caching=caching,
        overlap=overlap,
        num_states=states,
    )
    host = Host(config, random_accept(seed, 3))
    for _ in range(32):
        prompt = rng.choice(STEMS)[: rng.randint(1, 20)]
        host.add(prompt, SamplingParams(rng.randint(1, 40), max_drafts=rng.choice([None, None, 0, 2])))
        for _ in range(rng.randint(0, 4)):
            host.step()
        if rng.random() < 0.1:
            host.abort(rng.randint(1, len(host.requests)))
    host.drain()
    assert host.scheduler.stats.preemptions >= 10
