"""An engine in a process of its own: what it says crosses unchanged, its end is noticed, and nothing stays behind."""

import dataclasses
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from specdec.engine.process_client import ProcessClient
from specdec.engine.wire import decode, encode, encode_outputs
from specdec.errors import CheckpointError, ConfigError, EngineError
from specdec.messages import (
    AbortRequests,
    EngineFailure,
    EngineInfo,
    EngineReady,
    EngineRequest,
    EngineStats,
    ErrorInfo,
    RequestOutput,
    SamplingParams,
    StatsQuery,
)
from tests.helpers.echo_engine import BuildEcho, echo_folder
from tests.helpers.servers import ROOT

PARAMS = SamplingParams(max_new_tokens=20, stop_ids=(3, 4), temperature=0.5, max_drafts=2)


@pytest.mark.parametrize(
    'message',
    [
        EngineRequest(2**40, tuple(range(100)), PARAMS),
        AbortRequests((1, 2)),
        AbortRequests(()),
        StatsQuery(),
        EngineStats(1, 2, 3, 4, 5, 6, 7),
        EngineFailure('config', 'must be small', 'dtype', None),
        EngineReady(EngineInfo('m', '/f', 10, 20, 30, eos_ids=(1,)), 'all of it'),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_cross_unchanged(message):
    assert decode(encode(message)) == message


def test_outputs_cross_unchanged():
    outputs = [
        RequestOutput(1, (1, 2, 3), None, True, 7, 0, ({1: -0.5, 2: float('-inf')}, {2: -1.0}, {3: -2.0})),
        RequestOutput(2, finish_reason='error', error=ErrorInfo('code', 'a message with ümlauts')),
    ]
    assert decode(encode_outputs(outputs)) == outputs
    assert decode(encode_outputs([])) == []


class Inbox:
    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self._changed = threading.Condition()

    def __call__(self, outputs: list[RequestOutput]) -> None:
        with self._changed:
            self.outputs += outputs
            self._changed.notify_all()

    def wait_for_ends(self, count: int) -> list[RequestOutput]:
        def ends() -> list[RequestOutput]:
            return [output for output in self.outputs if output.finish_reason is not None]

        with self._changed:
            assert self._changed.wait_for(lambda: len(ends()) >= count, 20), self.outputs
            return ends()


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> str:
    return str(echo_folder(tmp_path_factory.mktemp('echo')))


def prompt_of(folder: str, text: str) -> tuple[int, ...]:
    from specdec.engine.tokenizer import Tokenizer

    return tuple(Tokenizer.load(folder).encode(text))


def test_a_whole_life_and_a_sudden_end(folder):
    client = ProcessClient(BuildEcho(folder))
    inbox = Inbox()
    client.start(inbox)
    assert (client.info.model_name, client.memory) == ('echo', 'no pages')
    prompt = prompt_of(folder, 'The quick brown fox jumps')
    client.submit(EngineRequest(1, prompt, dataclasses.replace(PARAMS, stop_ids=(), max_new_tokens=100)))
    (end,) = inbox.wait_for_ends(1)
    assert end.finish_reason == 'length'
    assert tuple(i for output in inbox.outputs for i in output.token_ids) == prompt

    client.submit(EngineRequest(2, prompt_of(folder, '!endless'), dataclasses.replace(PARAMS, max_new_tokens=10**6)))
    told: list[EngineStats] = []
    asked = threading.Event()
    client.request_stats(lambda stats: (told.append(stats), asked.set()))
    assert asked.wait(10)
    assert told[0].num_running == 1
    client.abort((2, 77))

    client.submit(EngineRequest(3, prompt_of(folder, '!endless'), dataclasses.replace(PARAMS, max_new_tokens=10**6)))
    client.process.kill()
    end = inbox.wait_for_ends(2)[1]
    assert (end.request_id, end.error.code) == (3, 'engine_error')
    assert end.error.message == 'the engine process ended unexpectedly (killed by SIGKILL)'
    assert isinstance(client.failure, EngineError)
    with pytest.raises(EngineError, match='SIGKILL'):
        client.submit(EngineRequest(4, prompt, PARAMS))
    client.close()
    client.close()


@pytest.mark.parametrize(
    ('command', 'cause'),
    [('!crash', 'the engine failed: RuntimeError: the device is on fire'), ('!die', 'exit status 7')],
)
def test_a_failing_step_ends_every_request_with_its_cause(folder, command, cause):
    client = ProcessClient(BuildEcho(folder))
    inbox = Inbox()
    client.start(inbox)
    client.submit(EngineRequest(1, prompt_of(folder, '!endless'), dataclasses.replace(PARAMS, max_new_tokens=10**6)))
    client.submit(EngineRequest(2, prompt_of(folder, command), PARAMS))
    ends = inbox.wait_for_ends(2)
    assert {end.request_id for end in ends} == {1, 2}
    assert all(cause in end.error.message for end in ends)
    client.close()
    assert not client.process.is_alive()


class Refuses:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self):
        raise self._error


class Exits:
    def __call__(self):
        os._exit(9)


@pytest.mark.parametrize('kind', [ConfigError, CheckpointError])
def test_an_error_at_the_start_is_raised_here(kind):
    with pytest.raises(kind) as raised:
        ProcessClient(Refuses(kind('session_len', 12, 'is too short')))
    assert str(raised.value) == 'session_len=12: is too short'
    assert type(raised.value) is kind


def test_other_ends_at_the_start():
    with pytest.raises(EngineError, match='could not start: ValueError: what'):
        ProcessClient(Refuses(ValueError('what')))
    with pytest.raises(EngineError, match=r'while it was loading \(exit status 9\)'):
        ProcessClient(Exits())


ORPHAN = """
import sys, time
from specdec.engine.process_client import ProcessClient
from tests.helpers.echo_engine import BuildEcho
if __name__ == '__main__':
    client = ProcessClient(BuildEcho(sys.argv[1]))
    print(client.process.pid, flush=True)
    time.sleep({seconds})
"""


@pytest.mark.parametrize('ending', ['kill', 'exit'])
def test_no_orphan_stays_behind(folder, tmp_path: Path, ending):
    """Neither when the parent is killed, nor when it forgets to close."""
    program = tmp_path / 'parent.py'
    program.write_text(ORPHAN.format(seconds=60 if ending == 'kill' else 0))
    environment = os.environ | {'PYTHONPATH': str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(program), folder], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        if ending == 'kill':
            parent.kill()
        assert parent.wait(20) is not None
        deadline = time.monotonic() + 10
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, 'the engine process lives on'
            time.sleep(0.05)
