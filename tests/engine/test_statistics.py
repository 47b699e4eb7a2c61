from specdec.engine.statistics import Histogram, RequestClock, ServingStatistics


def test_histogram():
    histogram = Histogram((1, 2, 5))
    for value in (0, 1, 1.5, 2, 6):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 0, 1]
    assert (histogram.total, histogram.num_observations) == (10.5, 5)


def test_identity_and_means():
    statistics = ServingStatistics(num_drafts=3)
    drafting, plain = RequestClock(statistics, 10.0, True), RequestClock(statistics, 10.0, False)
    for clock in (drafting, plain):
        clock.first(7, 4)
        clock.step(11.0, 1, False, 0)
    drafting.step(11.5, 4, True, 3)
    drafting.step(12.0, 1, True, 3)
    drafting.step(12.25, 2, True, 0)  # a length of zero would emit one; this one was cut by nobody
    drafting.step(13.0, 1, False, 0)  # a prompt that ends again, after a preemption
    plain.step(12.0, 1, True, 0)
    drafting.end(13.0, 'stop')
    plain.end(12.0, 'abort')
    assert statistics.emitted == statistics.prefill_firsts + statistics.decode_steps + statistics.accepted == 11
    assert (statistics.drafting_steps, statistics.drafted, statistics.accepted) == (3, 6, 4)
    assert statistics.accepted_per_position == [2, 1, 1]
    assert statistics.verified_rows == 10
    assert statistics.mean_accepted_length == 1 + 4 / 3
    assert (statistics.prompt_tokens, statistics.cached_tokens) == (14, 8)
    assert statistics.finished == {'stop': 1, 'length': 0, 'abort': 1, 'error': 0}
    assert statistics.time_to_first_token.total == 2.0
    assert statistics.inter_token_latency.num_observations == 5
    assert statistics.e2e_latency.total == 5.0


def test_a_request_without_tokens_has_no_times_but_its_end():
    statistics = ServingStatistics(0)
    RequestClock(statistics, 0.0, False).end(1.0, 'error')
    assert statistics.e2e_latency.num_observations == 1
    assert statistics.request_generation_tokens.num_observations == 0
    assert statistics.mean_accepted_length == 0.0
