import queue
import threading

import pytest

from specdec.engine.client import ThreadClient
from specdec.errors import EngineError, RequestError
from specdec.messages import EngineRequest, SamplingParams
from tests.helpers.fake_engine import FakeEngine, in_steps


def request(request_id: int) -> EngineRequest:
    return EngineRequest(request_id, (1, 2, 3), SamplingParams(max_new_tokens=100))


class Outputs:
    """Collects what a client delivers."""

    def __init__(self) -> None:
        self.steps: queue.SimpleQueue = queue.SimpleQueue()

    def __call__(self, outputs) -> None:
        self.steps.put(outputs)

    def until_finished(self, *request_ids: int) -> dict[int, list]:
        by_request = {request_id: [] for request_id in request_ids}
        open_ids = set(request_ids)
        while open_ids:
            for output in self.steps.get(timeout=5):
                by_request[output.request_id].append(output)
                if output.finish_reason is not None:
                    open_ids.remove(output.request_id)
        return by_request


def started(engine) -> tuple[ThreadClient, Outputs]:
    client, outputs = ThreadClient(engine), Outputs()
    client.start(outputs)
    return client, outputs


def test_requests_go_in_and_outputs_come_out():
    engine = FakeEngine(lambda _: in_steps(range(10), 4))
    client, outputs = started(engine)
    for request_id in (1, 2):
        client.submit(request(request_id))
    by_request = outputs.until_finished(1, 2)
    for request_id in (1, 2):
        assert [o.token_ids for o in by_request[request_id]] == [(0,), (1, 2, 3, 4), (5, 6, 7, 8), (9,)]
    client.close()
    client.close()
    assert engine.closed
    with pytest.raises(EngineError, match='closed'):
        client.submit(request(3))


def test_abort_reaches_the_engine():
    gate = threading.Event()
    engine = FakeEngine(lambda _: in_steps(range(10), 1), gate=gate)
    client, outputs = started(engine)
    for request_id in (1, 2):
        client.submit(request(request_id))
    client.abort((1, 99))
    gate.set()
    seen = []
    while not seen or seen[-1].request_id != 2 or seen[-1].finish_reason is None:
        seen += outputs.steps.get(timeout=5)
    client.close()
    assert engine.aborted == [1, 99]
    assert all(output.finish_reason is None for output in seen if output.request_id == 1)


def test_refused_request_ends_alone():
    engine = FakeEngine(lambda _: [], refuse=RequestError('prompt', 'x', 'is bad', 'bad_prompt'))
    client, outputs = started(engine)
    client.submit(request(1))
    (output,) = outputs.until_finished(1)[1]
    assert (output.finish_reason, output.error.code, output.error.message) == (
        'error',
        'bad_prompt',
        "prompt='x': is bad",
    )
    assert client.failure is None
    client.close()


def test_a_failing_step_ends_every_request_and_is_told_to_later_ones():
    gate = threading.Event()
    engine = FakeEngine(lambda _: in_steps(range(10), 1), fail_at=3, gate=gate)
    client, outputs = started(engine)
    client.submit(request(1))
    client.submit(request(2))
    gate.set()
    by_request = outputs.until_finished(1, 2)
    for request_id in (1, 2):
        last = by_request[request_id][-1]
        assert last.error.code == 'engine_error'
        assert last.error.message == 'the engine failed: RuntimeError: the device is on fire'
    with pytest.raises(EngineError, match='the device is on fire'):
        client.submit(request(3))
    assert isinstance(client.failure, RuntimeError)
    client.close()
    assert engine.closed


def test_a_request_in_the_inbox_of_a_failed_engine_ends_too():
    engine = FakeEngine(lambda _: in_steps(range(10), 1), fail_at=1)
    client, outputs = started(engine)
    client.submit(request(1))
    outputs.until_finished(1)
    client._inbox.put(request(2))  # as a submit that passed its check just before the failure
    assert outputs.until_finished(2)[2][-1].finish_reason == 'error'
    client.close()


def test_closed_before_it_was_started():
    engine = FakeEngine(lambda _: [])
    ThreadClient(engine).close()
    assert engine.closed
