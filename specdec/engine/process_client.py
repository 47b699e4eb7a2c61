"""An engine in one spawned process: messages over a pipe, and nothing else between the two sides.

The child's life hangs on the pipe: when its other end closes, however that came about, the child ends. So no signal
reaches the engine in the middle of a step and no orphan stays behind. Next: engine.py, which the child drives.
"""

import atexit
import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from specdec.engine.client import Engine, OnOutputs, OnStats, describe, error_output
from specdec.engine.logs import set_log_level
from specdec.engine.wire import decode, encode, encode_outputs
from specdec.errors import CheckpointError, ConfigError, EngineError, RequestError
from specdec.messages import (
    AbortRequests,
    EngineFailure,
    EngineInfo,
    EngineReady,
    EngineRequest,
    EngineStats,
    ErrorInfo,
    GrammarVocabulary,
    PytorchEngineConfig,
    RequestOutput,
    SpeculativeConfig,
    StatsQuery,
)

CLOSE_SECONDS = 10.0  # a child that takes longer to end is killed

Build = Callable[[], tuple[Engine, str]]  # runs in the child: the engine, and its memory plan in one line

logger = logging.getLogger('specdec')


class BuildEngine:
    """What the child builds, as arguments that cross to it."""

    def __init__(self, model_path: str, config: PytorchEngineConfig, speculative: SpeculativeConfig | None) -> None:
        self._arguments = model_path, config, speculative

    def __call__(self) -> tuple[Engine, str]:
        from specdec.engine.build import build_engine

        engine = build_engine(*self._arguments)
        if engine.ranks is not None:
            engine.ranks.on_failure = lambda: os._exit(1)  # nobody may ask for a step that would notice
        return engine, engine.memory.describe()


class ProcessClient:
    """Spawns an engine and talks to it. The constructor returns when the engine is ready, with `info` and `memory`.

    ConfigError and CheckpointError of the child are raised here; EngineError if it ends before it is ready.
    """

    def __init__(self, build: Build, log_level: str = 'WARNING', spawns: bool = False) -> None:
        """`spawns`: the engine starts processes of its own, which a daemonic one may not."""
        context = multiprocessing.get_context('spawn')
        self._connection, far_end = context.Pipe()
        self.process = context.Process(
            target=run_engine, args=(far_end, build, log_level), name='specdec-engine', daemon=not spawns
        )
        self._closed = False
        self._failure: BaseException | None = None
        self._live: set[int] = set()
        self._lock = threading.Lock()  # of `_live` and `_failure`
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._stats_readers: deque[OnStats] = deque()
        self._threads: list[threading.Thread] = []
        self.process.start()
        far_end.close()
        atexit.register(self.close)  # before multiprocessing's own, which would wait for a child that waits for us
        try:
            ready = self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        self.info: EngineInfo = ready.info
        self.memory = ready.memory

    def start(self, on_outputs: OnOutputs) -> None:
        assert not self._threads, 'a client starts once'
        self._threads = [
            threading.Thread(target=self._read, args=(on_outputs,), name='specdec-engine-reader', daemon=True),
            threading.Thread(target=self._write, name='specdec-engine-writer', daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: EngineRequest) -> None:
        with self._lock:
            if self._failure is not None:
                raise EngineError(str(self._failure)) from self._failure
            if self._closed:
                raise EngineError('the engine is closed')
            self._live.add(request.request_id)
        self._outbox.put(encode(request))

    def set_vocabulary(self, vocabulary: GrammarVocabulary) -> None:
        self._outbox.put(encode(vocabulary))

    def abort(self, request_ids: Sequence[int]) -> None:
        with self._lock:
            self._live.difference_update(request_ids)
        self._outbox.put(encode(AbortRequests(tuple(request_ids))))

    def request_stats(self, on_stats: OnStats) -> None:
        self._stats_readers.append(on_stats)
        self._outbox.put(encode(StatsQuery()))

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._outbox.put(None)
        if self._threads:
            self._threads[1].join(CLOSE_SECONDS)  # what was sent before is on its way
        with contextlib.suppress(OSError):
            self._connection.send_bytes(b'')
        self.process.join(CLOSE_SECONDS)
        if self.process.is_alive():
            logger.warning('the engine process does not end; it is killed')
            self.process.kill()
            self.process.join()
        if self._threads and self._threads[0] is not threading.current_thread():
            self._threads[0].join(CLOSE_SECONDS)
        self._connection.close()

    # ------------------------------------------------------------------------------------------------ inside
    def _wait_until_ready(self) -> EngineReady:
        try:
            message = decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise EngineError(f'the engine process ended while it was loading ({self._how_it_ended()})') from None
        if isinstance(message, EngineFailure):
            raise _as_exception(message)
        assert isinstance(message, EngineReady), 'a child says first that it is ready'
        return message

    def _read(self, on_outputs: OnOutputs) -> None:
        """Takes what the child says, until it says no more."""
        try:
            while True:
                message = decode(self._connection.recv_bytes())
                if isinstance(message, list):
                    self._note_finished(message)
                    on_outputs(message)
                elif isinstance(message, EngineStats):
                    self._stats_readers.popleft()(message)
                else:
                    assert isinstance(message, EngineFailure), f'unexpected {type(message).__name__}'
                    self._fail(on_outputs, f'the engine failed: {message.message}')
        except (EOFError, OSError):
            if not self._closed and self._failure is None:
                self._fail(on_outputs, f'the engine process ended unexpectedly ({self._how_it_ended()})')

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the reader notices, and tells
            while (data := self._outbox.get()) is not None:
                self._connection.send_bytes(data)

    def _note_finished(self, outputs: list[RequestOutput]) -> None:
        finished = [output.request_id for output in outputs if output.finish_reason is not None]
        if finished:
            with self._lock:
                self._live.difference_update(finished)

    def _fail(self, on_outputs: OnOutputs, message: str) -> None:
        logger.error('%s', message)
        with self._lock:
            self._failure = EngineError(message)
            live, self._live = self._live, set()
        on_outputs([error_output(request_id, ErrorInfo('engine_error', message)) for request_id in live])

    def _how_it_ended(self) -> str:
        self.process.join(CLOSE_SECONDS)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f'killed by {signal.Signals(-code).name}'
        return f'exit status {code}'


def _as_exception(failure: EngineFailure) -> Exception:
    kinds = {'config': ConfigError, 'checkpoint': CheckpointError}
    if failure.kind in kinds:
        return kinds[failure.kind](failure.field, failure.value, failure.message)
    return EngineError(f'the engine could not start: {failure.message}')


# ----------------------------------------------------------------------------------------------------- the child
def run_engine(connection: Connection, build: Build, log_level: str) -> None:
    """The child's program: builds an engine, says so, and serves until the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the server, which closes the pipe when it has drained
    set_log_level(log_level)
    inbox: queue.SimpleQueue[EngineRequest | GrammarVocabulary | AbortRequests | StatsQuery | None] = (
        queue.SimpleQueue()
    )
    threading.Thread(target=_receive, args=(connection, inbox), name='specdec-inbox', daemon=True).start()
    try:
        engine, memory = build()
    except BaseException as error:
        if not isinstance(error, ConfigError):
            logger.exception('the engine could not start')
        _send(connection, encode(_start_failure(error)))
        return
    _send(connection, encode(EngineReady(engine.info, memory)))
    try:
        while _take_messages(connection, engine, inbox):
            if outputs := engine.step():
                _send(connection, encode_outputs(outputs))
        engine.close()
    except BaseException as error:
        logger.exception('the engine failed')
        _send(connection, encode(EngineFailure('engine', describe(error))))
        raise SystemExit(1) from None


def _receive(connection: Connection, inbox: queue.SimpleQueue) -> None:
    """An empty message asks for an orderly end; a closed pipe means that nobody is left to work for."""
    try:
        while data := connection.recv_bytes():
            inbox.put(decode(data))
        inbox.put(None)
    except (EOFError, OSError):
        os._exit(1)


def _take_messages(connection: Connection, engine: Engine, inbox: queue.SimpleQueue) -> bool:
    """Waits for messages while there is nothing to do; False when the client is closed."""
    while not inbox.empty() or not engine.has_work():
        message = inbox.get()
        if message is None:
            return False
        if isinstance(message, EngineRequest):
            try:
                engine.add(message)
            except RequestError as error:
                refusal = error_output(message.request_id, ErrorInfo(error.code, str(error)))
                _send(connection, encode_outputs([refusal]))
        elif isinstance(message, AbortRequests):
            engine.abort(message.request_ids)
        elif isinstance(message, GrammarVocabulary):
            engine.set_vocabulary(message)
        else:
            _send(connection, encode(engine.stats()))
    return True


def _send(connection: Connection, data: bytes) -> None:
    try:
        connection.send_bytes(data)
    except OSError:
        os._exit(1)


def _start_failure(error: BaseException) -> EngineFailure:
    if not isinstance(error, ConfigError):
        return EngineFailure('engine', describe(error))
    value = error.value if isinstance(error.value, (str, int, float, bool, type(None))) else str(error.value)
    kind = 'checkpoint' if isinstance(error, CheckpointError) else 'config'
    return EngineFailure(kind, error.remedy, error.field, value)
