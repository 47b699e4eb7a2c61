"""The one way to talk to an engine: requests in, outputs back through a callback, once per step.

ThreadClient runs the engine in a thread of this process; process_client.py one in a process of its own, with the same
messages. Next: async_engine.py and pipeline.py, the users of a client.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from specdec.errors import EngineError, RequestError
from specdec.messages import (
    AbortRequests,
    EngineInfo,
    EngineRequest,
    EngineStats,
    ErrorInfo,
    GrammarVocabulary,
    RequestOutput,
)

OnOutputs = Callable[[list[RequestOutput]], None]
OnStats = Callable[[EngineStats], None]

logger = logging.getLogger('specdec')


class Engine(Protocol):
    """What a client drives; everything but `info` is called from one thread."""

    info: EngineInfo

    def add(self, request: EngineRequest) -> None:
        """RequestError if this request can never run."""

    def set_vocabulary(self, vocabulary: GrammarVocabulary) -> None:
        """What grammars must know of the tokenizer; before the first request that has one."""

    def abort(self, request_ids: Sequence[int]) -> None: ...

    def has_work(self) -> bool: ...

    def step(self) -> list[RequestOutput]:
        """Runs one step; what it gave, possibly nothing."""

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


class EngineClient(Protocol):
    """A running engine, seen from the server's side. All methods return at once; only `close` waits."""

    info: EngineInfo

    def start(self, on_outputs: OnOutputs) -> None:
        """From now on `on_outputs` is called once per step, from another thread than the caller's."""

    def submit(self, request: EngineRequest) -> None:
        """Every request ends with an output that has a finish_reason. EngineError if the engine is dead or closed."""

    def set_vocabulary(self, vocabulary: GrammarVocabulary) -> None:
        """Goes in front of the first request that has a grammar."""

    def abort(self, request_ids: Sequence[int]) -> None:
        """No output is owed for these any more; unknown and finished ids are no error."""

    def request_stats(self, on_stats: OnStats) -> None:
        """Calls `on_stats` between two steps, from another thread than the caller's; never, if the engine is dead."""

    @property
    def failure(self) -> BaseException | None:
        """What the engine died of, if it did."""

    def close(self) -> None: ...


class ThreadClient:
    """Runs an engine in a daemon thread of this process."""

    def __init__(self, engine: Engine) -> None:
        self.info = engine.info
        self._engine = engine
        self._inbox: queue.SimpleQueue[EngineRequest | GrammarVocabulary | AbortRequests | OnStats | None] = (
            queue.SimpleQueue()
        )
        self._live: set[int] = set()  # written by the engine's thread only
        self._failure: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, on_outputs: OnOutputs) -> None:
        assert self._thread is None, 'a client starts once'
        self._thread = threading.Thread(target=self._run, args=(on_outputs,), name='specdec-engine', daemon=True)
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        if self._failure is not None:
            raise EngineError(f'the engine has failed: {describe(self._failure)}') from self._failure
        if self._closed:
            raise EngineError('the engine is closed')
        self._inbox.put(request)

    def set_vocabulary(self, vocabulary: GrammarVocabulary) -> None:
        self._inbox.put(vocabulary)

    def abort(self, request_ids: Sequence[int]) -> None:
        self._inbox.put(AbortRequests(tuple(request_ids)))

    def request_stats(self, on_stats: OnStats) -> None:
        self._inbox.put(on_stats)

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._inbox.put(None)
        if self._thread is None:
            self._engine.close()
        elif self._thread is not threading.current_thread():  # the garbage collector may run this anywhere
            self._thread.join()

    # ------------------------------------------------------------------------------------- the engine's thread
    def _run(self, on_outputs: OnOutputs) -> None:
        try:
            self._serve(on_outputs)
        except BaseException as error:
            logger.exception('the engine failed')
            self._failure = error
        try:
            self._engine.close()
        except Exception:
            logger.exception('the engine could not be closed')
        if self._failure is not None:
            self._fail_all(on_outputs, ErrorInfo('engine_error', f'the engine failed: {describe(self._failure)}'))

    def _serve(self, on_outputs: OnOutputs) -> None:
        while self._take_messages(on_outputs):
            if outputs := self._engine.step():
                self._live.difference_update([o.request_id for o in outputs if o.finish_reason is not None])
                on_outputs(outputs)

    def _take_messages(self, on_outputs: OnOutputs) -> bool:
        """Waits for messages while there is nothing to do; False when the client is closed."""
        while not self._inbox.empty() or not self._engine.has_work():
            message = self._inbox.get()
            if message is None:
                return False
            if isinstance(message, AbortRequests):
                self._live.difference_update(message.request_ids)
                self._engine.abort(message.request_ids)
                continue
            if isinstance(message, GrammarVocabulary):
                self._engine.set_vocabulary(message)
                continue
            if callable(message):
                message(self._engine.stats())
                continue
            try:
                self._engine.add(message)
                self._live.add(message.request_id)
            except RequestError as error:
                on_outputs([error_output(message.request_id, ErrorInfo(error.code, str(error)))])
        return True

    def _fail_all(self, on_outputs: OnOutputs, error: ErrorInfo) -> None:
        """Ends every request, also those in the inbox and those of a submit that had just passed its check."""
        on_outputs([error_output(request_id, error) for request_id in self._live])
        while (message := self._inbox.get()) is not None:
            if isinstance(message, EngineRequest):
                on_outputs([error_output(message.request_id, error)])


def describe(error: BaseException) -> str:
    """One line that names an exception and its message."""
    return f'{type(error).__name__}: {error}'.splitlines()[0]


def error_output(request_id: int, error: ErrorInfo) -> RequestOutput:
    return RequestOutput(request_id, finish_reason='error', error=error)
