"""/metrics: the counts of engine/statistics.py and the engine's own, as Prometheus reads them, with LMDeploy's names.

Every metric is labelled with the served model and the engine's rank, so that rows of several servers stay apart.
docs/en/metrics.md explains each. Next: ../engine/statistics.py, where they are counted.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from specdec.engine.statistics import Histogram, ServingStatistics
from specdec.messages import EngineStats

PREFIX = 'specdec:'
LABELS = ('model_name', 'engine')
ENGINE_RANK = '0'

GAUGES = {
    'num_requests_running': 'Requests that hold a slot of the batch.',
    'num_requests_waiting': 'Requests that wait for a slot or for pages.',
    'num_api_requests_routed': 'HTTP requests under way, one for each choice: running, waiting or being sent.',
    'num_requests_succeeded': 'Requests that ended with stop or length.',
    'num_requests_failed': 'Requests that ended with an error or were aborted.',
    'gpu_cache_usage_perc': 'Share of the cache pages that requests hold, 0 to 1 (on any device).',
    'prefix_cache_hit_rate': 'Prompt tokens found in the prefix cache, of all prompt tokens, 0 to 1.',
    'engine_up': '1 while the engine is alive.',
    'spec_decode_mean_accept_rate': 'Accepted of all drafted tokens, since the start.',
    'spec_decode_draft_budget': 'Drafted rows that the latest step could verify; absent where lengths do not adapt.',
    'spec_decode_drafting': '1 if the latest step drafted blocks, 0 if that did not pay.',
    'spec_decode_mean_accept_length': 'Tokens per decode step that may have drafts, its own token included.',
}
COUNTERS = {
    'prompt_tokens': 'Prompt tokens of requests that got a first token.',
    'cached_tokens': 'Those of them that the prefix cache had.',
    'generation_tokens': 'Tokens emitted, stop tokens included: prefill firsts + decode steps + accepted tokens.',
    'prefill_first_tokens': 'Tokens drawn by the last chunk of a prompt.',
    'decode_steps': 'Steps of single requests that emitted tokens, prompt chunks aside.',
    'verified_rows': 'Rows of these steps: one each, and one for every drafted token.',
    'spec_decode_num_drafts': 'Decode steps of requests that may have drafts, those without any included.',
    'spec_decode_num_draft_tokens': 'Drafted tokens that were verified.',
    'spec_decode_num_accepted_tokens': 'Drafted tokens that became part of an answer.',
    'engine_steps': 'Steps of the engine.',
    'num_preemptions': 'Requests that had to give back their pages and start again.',
}
LENGTHS = 'spec_decode_num_steps_per_length', 'Decode steps that may have drafts, by how many of them were verified.'
POSITIONS = {
    'spec_decode_num_accepted_tokens_per_pos': 'Decode steps in which at least so many drafted tokens were accepted.',
    'spec_decode_per_position_accept_rate': 'The same, of all steps that may have drafts.',
}
HISTOGRAMS = {
    'time_to_first_token_seconds': 'From a request to its first token.',
    'iter_token_latency': 'Seconds between two steps that gave one request tokens (inter-token latency).',
    'time_per_output_token_seconds': "A request's decode time over its tokens but the first.",
    'e2e_request_latency_seconds': 'From a request to its end.',
    'request_decode_time_seconds': "From a request's first token to its last.",
    'request_prompt_tokens': 'Prompt tokens per request.',
    'request_generation_tokens': 'Tokens emitted per request.',
    'request_cached_tokens': 'Cached prompt tokens per request.',
    'iteration_tokens_total': 'Tokens per step of the engine, over all requests.',
}
FINISHED = 'request_success'
INFO = 'backend_config_info'


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment. `engine` None: it does not answer."""

    model_name: str
    statistics: ServingStatistics
    engine: EngineStats | None
    num_api_requests: int
    settings: dict[str, str]


def exposition(snapshot: Snapshot) -> bytes:
    """The text of /metrics."""
    registry = CollectorRegistry()
    registry.register(_Collector(snapshot))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._labels = (snapshot.model_name, ENGINE_RANK)

    def collect(self) -> Iterable[Metric]:
        yield from self._scalars(GaugeMetricFamily, GAUGES, self._gauges())
        yield from self._scalars(CounterMetricFamily, COUNTERS, self._counters())
        yield from self._by_position()
        yield self._by_length()
        yield self._finished()
        yield from self._histograms()
        info = InfoMetricFamily(PREFIX + INFO.removesuffix('_info'), 'Settings of the engine.', labels=LABELS)
        info.add_metric(self._labels, self._snapshot.settings)
        yield info

    def _gauges(self) -> dict[str, float]:
        counted, engine = self._snapshot.statistics, self._snapshot.engine
        finished = counted.finished
        values = {
            'num_api_requests_routed': self._snapshot.num_api_requests,
            'num_requests_succeeded': finished['stop'] + finished['length'],
            'num_requests_failed': finished['error'] + finished['abort'],
            'prefix_cache_hit_rate': _share(counted.cached_tokens, counted.prompt_tokens),
            'engine_up': float(engine is not None),
            'spec_decode_mean_accept_rate': _share(counted.accepted, counted.drafted),
            'spec_decode_mean_accept_length': counted.mean_accepted_length,
        }
        if engine is not None:
            values |= {
                'num_requests_running': engine.num_running,
                'num_requests_waiting': engine.num_waiting,
                'gpu_cache_usage_perc': _share(engine.num_pages_held, engine.num_pages),
                'spec_decode_drafting': float(engine.drafting),
            }
            if engine.draft_budget is not None:
                values['spec_decode_draft_budget'] = engine.draft_budget
        return values

    def _counters(self) -> dict[str, float]:
        counted, engine = self._snapshot.statistics, self._snapshot.engine
        values = {
            'prompt_tokens': counted.prompt_tokens,
            'cached_tokens': counted.cached_tokens,
            'generation_tokens': counted.emitted,
            'prefill_first_tokens': counted.prefill_firsts,
            'decode_steps': counted.decode_steps,
            'verified_rows': counted.verified_rows,
            'spec_decode_num_drafts': counted.drafting_steps,
            'spec_decode_num_draft_tokens': counted.drafted,
            'spec_decode_num_accepted_tokens': counted.accepted,
        }
        if engine is not None:
            values |= {'engine_steps': engine.num_steps, 'num_preemptions': engine.num_preemptions}
        return values

    def _scalars(
        self, family: type[GaugeMetricFamily | CounterMetricFamily], texts: dict[str, str], values: dict[str, float]
    ) -> Iterator[Metric]:
        for name, text in texts.items():
            if name in values:
                metric = family(PREFIX + name, text, labels=LABELS)
                metric.add_metric(self._labels, values[name])
                yield metric

    def _by_position(self) -> Iterator[Metric]:
        counted = self._snapshot.statistics
        for (name, text), family in zip(POSITIONS.items(), (CounterMetricFamily, GaugeMetricFamily)):
            metric = family(PREFIX + name, text, labels=(*LABELS, 'position'))
            for position, count in enumerate(counted.accepted_per_position):
                value = count if family is CounterMetricFamily else _share(count, counted.drafting_steps)
                metric.add_metric((*self._labels, str(position)), value)
            yield metric

    def _by_length(self) -> Metric:
        name, text = LENGTHS
        metric = CounterMetricFamily(PREFIX + name, text, labels=(*LABELS, 'length'))
        for length, count in enumerate(self._snapshot.statistics.steps_per_length):
            metric.add_metric((*self._labels, str(length)), count)
        return metric

    def _finished(self) -> Metric:
        text = 'Requests that ended, by the reason.'
        metric = CounterMetricFamily(PREFIX + FINISHED, text, labels=(*LABELS, 'finished_reason'))
        for reason, count in self._snapshot.statistics.finished.items():
            metric.add_metric((*self._labels, reason), count)
        return metric

    def _histograms(self) -> Iterator[Metric]:
        counted = self._snapshot.statistics
        found: dict[str, Histogram] = {
            'time_to_first_token_seconds': counted.time_to_first_token,
            'iter_token_latency': counted.inter_token_latency,
            'time_per_output_token_seconds': counted.time_per_output_token,
            'e2e_request_latency_seconds': counted.e2e_latency,
            'request_decode_time_seconds': counted.decode_time,
            'request_prompt_tokens': counted.request_prompt_tokens,
            'request_generation_tokens': counted.request_generation_tokens,
            'request_cached_tokens': counted.request_cached_tokens,
            'iteration_tokens_total': counted.step_tokens,
        }
        for name, text in HISTOGRAMS.items():
            metric = HistogramMetricFamily(PREFIX + name, text, labels=LABELS)
            metric.add_metric(self._labels, _cumulative(found[name]), found[name].total)
            yield metric


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    buckets, running = [], 0
    for bound, count in zip((*map(str, map(float, histogram.bounds)), '+Inf'), histogram.counts):
        running += count
        buckets.append((bound, running))
    return buckets


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
