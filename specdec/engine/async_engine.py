"""The server's side of the engine: requests in, streams of Responses out, many at once on one asyncio loop.

It never waits for a reader: what a slow one has not taken yet is merged into one piece. Next: client.py, which carries
the requests to the engine.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence

from specdec.engine.client import EngineClient
from specdec.engine.live_request import LiveRequest, RequestMaker
from specdec.engine.statistics import RequestClock, ServingStatistics
from specdec.engine.tokenizer import Tokenizer
from specdec.errors import EngineError
from specdec.messages import EngineInfo, EngineStats, FinishReason, GenerationConfig, RequestOutput, Response

MAX_INBOX = 1024  # outputs that may wait for their request's end before they are worked off


class AsyncEngine:
    """Generates text for many requests at once. All methods belong to the loop that `start` was awaited on."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, generation_defaults: GenerationConfig | None = None
    ) -> None:
        """`generation_defaults` serve requests that bring no settings of their own."""
        self.info: EngineInfo = client.info
        self.tokenizer = tokenizer
        self.statistics = ServingStatistics(client.info.num_drafts)
        self._client = client
        self._maker = RequestMaker(client.info, tokenizer, client.set_vocabulary, generation_defaults)
        self._readers: dict[int, _Reader] = {}
        self._eager_ids: set[int] = set()
        self._inbox: deque[tuple[float, list[RequestOutput]]] = deque()  # filled by the engine's thread: time, outputs
        self._num_inbox = 0
        self._delivery_due = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._client.start(self._on_outputs)

    @property
    def num_live(self) -> int:
        """Requests that have not ended yet."""
        return len(self._readers)

    @property
    def failure(self) -> BaseException | None:
        """What the engine died of, if it did."""
        return self._client.failure

    async def stats(self, timeout: float = 10.0) -> EngineStats:
        """The engine's own figures, between two of its steps; EngineError if it does not answer in `timeout` s."""
        if self.failure is not None:
            raise EngineError(str(self.failure))
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[EngineStats] = loop.create_future()

        def give(stats: EngineStats) -> None:
            loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(stats))

        self._client.request_stats(give)
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            raise EngineError(f'the engine does not answer within {timeout:g} s') from None

    def new_request_id(self) -> int:
        return self._maker.new_request_id()

    def generate(
        self,
        prompt_ids: Sequence[int],
        gen_config: GenerationConfig | None = None,
        *,
        stream_response: bool = True,
        request_id: int | None = None,
    ) -> AsyncGenerator[Response]:
        """Pieces of the answer, each with the text and ids that are new; counts and speculation figures are totals.

        The last piece is empty but for its finish_reason; without `stream_response` one piece holds everything.
        RequestError is raised at once, EngineError before the first piece; what fails later ends in finish_reason
        'error'. Closing or cancelling the iterator aborts the request.
        """
        return self.stream(self.make(prompt_ids, gen_config, stream_response, request_id))

    def make(
        self,
        prompt_ids: Sequence[int],
        gen_config: GenerationConfig | None = None,
        stream_response: bool = True,
        request_id: int | None = None,
    ) -> LiveRequest:
        """Checks a request without starting it, for `stream`. RequestError names what cannot be served."""
        return self._maker.make(prompt_ids, gen_config, stream_response, request_id)

    def make_choices(
        self, prompt_ids: Sequence[int], gen_config: GenerationConfig | None = None, stream_response: bool = True
    ) -> list[LiveRequest]:
        """The n requests of one prompt, each for `stream`; see `make`. Start the first one first."""
        return self._maker.make_choices(prompt_ids, gen_config, stream_response)

    async def prepare(self, gen_config: GenerationConfig) -> None:
        """Compiles a response_format off the loop, before `make` needs it. RequestError if it is not valid."""
        if gen_config.response_format is not None:
            await asyncio.to_thread(self._maker.prepare, gen_config)

    async def stream(self, live: LiveRequest) -> AsyncGenerator[Response]:
        """Starts a request that `make` has checked; see `generate`."""
        if self._loop is None or self._closed:
            raise EngineError('the engine is closed' if self._closed else 'the engine has not been started')
        request_id = live.request.request_id
        drafts = self.info.num_drafts > 0 and live.request.params.max_drafts != 0
        reader = self._readers[request_id] = _Reader(live, RequestClock(self.statistics, time.monotonic(), drafts))
        if live.is_eager:
            self._eager_ids.add(request_id)
        try:
            self._client.submit(live.request)
            while not live.taken_all:
                await reader.wait()
                yield live.take()
        finally:
            if self._forget(request_id, 'abort') is not None:
                self._client.abort((request_id,))

    def abort(self, request_id: int) -> bool:
        """Ends a request with finish_reason 'abort'; False if there is no such request any more."""
        reader = self._forget(request_id, 'abort')
        if reader is None:
            return False
        self._client.abort((request_id,))
        reader.live.end('abort')
        reader.wake()
        return True

    def close(self) -> None:
        """Ends every request with finish_reason 'abort', then the engine."""
        if self._closed:
            return
        self._closed = True
        self.abort_all()
        self._client.close()

    def abort_all(self) -> None:
        for request_id in tuple(self._readers):
            self.abort(request_id)

    # ------------------------------------------------------------------------------------------------- outputs
    def _on_outputs(self, outputs: list[RequestOutput]) -> None:
        """Called on the engine's thread. Wakes the loop only for what cannot wait for its request's end."""
        self._inbox.append((time.monotonic(), outputs))
        self._num_inbox += len(outputs)
        if self._delivery_due:
            return
        eager_ids = self._eager_ids
        for output in outputs:
            if output.finish_reason is not None or output.request_id in eager_ids or self._num_inbox > MAX_INBOX:
                self._delivery_due = True
                self._loop.call_soon_threadsafe(self._deliver)
                return

    def _deliver(self) -> None:
        self._delivery_due = False  # before the first look: what comes after the last one schedules a new delivery
        self._num_inbox = 0
        while self._inbox:
            now, outputs = self._inbox.popleft()
            num_emitted = sum(self._deliver_one(now, output) for output in outputs)
            if num_emitted:
                self.statistics.step_tokens.observe(num_emitted)

    def _deliver_one(self, now: float, output: RequestOutput) -> int:
        """How many tokens of the output its request has taken."""
        reader = self._readers.get(output.request_id)
        if reader is None:  # ended before the engine knew: by a stop string or an abort
            return 0
        live, clock = reader.live, reader.clock
        num_emitted = live.add(output)
        if num_emitted:
            if not clock.has_begun:
                clock.first(len(live.request.prompt_ids), output.cached_tokens)
            clock.step(now, num_emitted, output.decode, output.drafted)
        if live.finish_reason is not None:
            self._forget(output.request_id, live.finish_reason, now)
            if output.finish_reason is None:
                self._client.abort((output.request_id,))
        reader.wake()
        return num_emitted

    def _forget(self, request_id: int, finish_reason: FinishReason, now: float | None = None) -> '_Reader | None':
        """Takes a request out of the books, if it is there: no output of it counts any more."""
        self._eager_ids.discard(request_id)
        reader = self._readers.pop(request_id, None)
        if reader is not None:
            reader.clock.end(time.monotonic() if now is None else now, finish_reason)
        return reader


class _Reader:
    """A request and the task that may be waiting for its next piece."""

    __slots__ = ('_waiter', 'clock', 'live')

    def __init__(self, live: LiveRequest, clock: RequestClock) -> None:
        self.live, self.clock = live, clock
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Returns as soon as there is a piece to take."""
        while not self.live.has_piece:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and self.live.has_piece:
            self._waiter.set_result(None)
