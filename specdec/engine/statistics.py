"""What the server counts of its requests: tokens, steps, drafts and times, after every stop and limit has cut.

A step whose result nobody took (its request had ended) counts nowhere. Always: emitted = prefill firsts + decode steps
+ accepted. Plain numbers; serve/metrics.py turns them into Prometheus's text.
"""

from bisect import bisect_left
from collections.abc import Sequence

from specdec.messages import FinishReason

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class Histogram:
    """`counts[i]`: observations up to `bounds[i]` and above the bound before it; the last one: above all bounds."""

    __slots__ = ('bounds', 'counts', 'total')

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def num_observations(self) -> int:
        return sum(self.counts)


class ServingStatistics:
    """Totals since the start. One loop's: not thread-safe. `num_drafts`: the engine's K."""

    def __init__(self, num_drafts: int) -> None:
        self.prompt_tokens = self.cached_tokens = 0  # of requests that got a first token
        self.emitted = self.prefill_firsts = self.decode_steps = 0
        self.drafting_steps = self.drafted = self.accepted = 0
        self.accepted_per_position = [0] * num_drafts
        self.steps_per_length = [0] * (num_drafts + 1)
        self.finished: dict[FinishReason, int] = dict.fromkeys(('stop', 'length', 'abort', 'error'), 0)
        self.time_to_first_token = Histogram(SECONDS)
        self.inter_token_latency = Histogram(SECONDS)
        self.time_per_output_token = Histogram(SECONDS)
        self.e2e_latency = Histogram(SECONDS)
        self.decode_time = Histogram(SECONDS)
        self.request_prompt_tokens = Histogram(TOKENS)
        self.request_generation_tokens = Histogram(TOKENS)
        self.request_cached_tokens = Histogram((0, *TOKENS))
        self.step_tokens = Histogram(TOKENS)

    @property
    def verified_rows(self) -> int:
        """Rows of decode steps: one for the token before the drafts, and one for each drafted token."""
        return self.decode_steps + self.drafted

    @property
    def mean_accepted_length(self) -> float:
        return 1 + self.accepted / self.drafting_steps if self.drafting_steps else 0.0


class RequestClock:
    """One request's times and counts, told to the statistics as they happen. `drafts`: its steps may have drafts."""

    __slots__ = ('_arrival', '_drafts', '_first', '_last', '_num_emitted', '_statistics')

    def __init__(self, statistics: ServingStatistics, arrival: float, drafts: bool) -> None:
        self._statistics, self._arrival, self._drafts = statistics, arrival, drafts
        self._first = self._last = 0.0
        self._num_emitted = 0

    def first(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Called with the first output that brings tokens, before `step`."""
        statistics = self._statistics
        statistics.prompt_tokens += prompt_tokens
        statistics.cached_tokens += cached_tokens
        statistics.request_prompt_tokens.observe(prompt_tokens)
        statistics.request_cached_tokens.observe(cached_tokens)

    @property
    def has_begun(self) -> bool:
        return self._num_emitted > 0

    def step(self, now: float, num_emitted: int, decode: bool, drafted: int) -> None:
        """A step that gave this request tokens; `now` in seconds of the arrival's clock."""
        statistics = self._statistics
        statistics.emitted += num_emitted
        if self._num_emitted:
            statistics.inter_token_latency.observe(now - self._last)
        else:
            self._first = now
            statistics.time_to_first_token.observe(now - self._arrival)
        self._last = now
        self._num_emitted += num_emitted
        if not decode:
            statistics.prefill_firsts += 1
            return
        statistics.decode_steps += 1
        statistics.drafted += drafted
        num_accepted = num_emitted - 1
        statistics.accepted += num_accepted
        if self._drafts:
            statistics.drafting_steps += 1
            statistics.steps_per_length[drafted] += 1
            positions = statistics.accepted_per_position
            for position in range(min(num_accepted, len(positions))):
                positions[position] += 1

    def end(self, now: float, finish_reason: FinishReason) -> None:
        statistics = self._statistics
        statistics.finished[finish_reason] += 1
        statistics.e2e_latency.observe(now - self._arrival)
        if self._num_emitted:
            statistics.request_generation_tokens.observe(self._num_emitted)
            decode_seconds = self._last - self._first
            statistics.decode_time.observe(decode_seconds)
            if self._num_emitted > 1:
                statistics.time_per_output_token.observe(decode_seconds / (self._num_emitted - 1))
