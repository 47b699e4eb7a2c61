"""The server's side of the engine: requests in, streams of Responses out, many at once on one asyncio loop.

It never waits for a reader: what a slow one has not taken yet is merged into one piece. Next: client.py, which carries
the requests to the engine.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence

from specdec.engine.client import EngineClient
from specdec.engine.live_request import LiveRequest, RequestMaker
from specdec.engine.tokenizer import Tokenizer
from specdec.errors import EngineError
from specdec.messages import EngineInfo, GenerationConfig, RequestOutput, Response

MAX_INBOX = 1024  # outputs that may wait for their request's end before they are worked off


class AsyncEngine:
    """Generates text for many requests at once. All methods belong to the loop that `start` was awaited on."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, generation_defaults: GenerationConfig | None = None
    ) -> None:
        """`generation_defaults` serve requests that bring no settings of their own."""
        self.info: EngineInfo = client.info
        self.tokenizer = tokenizer
        self._client = client
        self._maker = RequestMaker(client.info, tokenizer, generation_defaults)
        self._readers: dict[int, _Reader] = {}
        self._eager_ids: set[int] = set()
        self._inbox: deque[RequestOutput] = deque()  # filled by the engine's thread, emptied by the loop
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

    async def stream(self, live: LiveRequest) -> AsyncGenerator[Response]:
        """Starts a request that `make` has checked; see `generate`."""
        if self._loop is None or self._closed:
            raise EngineError('the engine is closed' if self._closed else 'the engine has not been started')
        request_id = live.request.request_id
        reader = self._readers[request_id] = _Reader(live)
        if live.is_eager:
            self._eager_ids.add(request_id)
        try:
            self._client.submit(live.request)
            while not live.taken_all:
                await reader.wait()
                yield live.take()
        finally:
            if self._forget(request_id) is not None:
                self._client.abort((request_id,))

    def abort(self, request_id: int) -> bool:
        """Ends a request with finish_reason 'abort'; False if there is no such request any more."""
        reader = self._forget(request_id)
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
        for request_id in tuple(self._readers):
            self.abort(request_id)
        self._client.close()

    # ------------------------------------------------------------------------------------------------- outputs
    def _on_outputs(self, outputs: list[RequestOutput]) -> None:
        """Called on the engine's thread. Wakes the loop only for what cannot wait for its request's end."""
        self._inbox.extend(outputs)
        if self._delivery_due:
            return
        eager_ids = self._eager_ids
        for output in outputs:
            if output.finish_reason is not None or output.request_id in eager_ids or len(self._inbox) > MAX_INBOX:
                self._delivery_due = True
                self._loop.call_soon_threadsafe(self._deliver)
                return

    def _deliver(self) -> None:
        self._delivery_due = False  # before the first look: what comes after the last one schedules a new delivery
        while self._inbox:
            output = self._inbox.popleft()
            reader = self._readers.get(output.request_id)
            if reader is None:  # ended before the engine knew: by a stop string or an abort
                continue
            reader.live.add(output)
            if reader.live.finish_reason is not None:
                self._forget(output.request_id)
                if output.finish_reason is None:
                    self._client.abort((output.request_id,))
            reader.wake()

    def _forget(self, request_id: int) -> '_Reader | None':
        """Takes a request out of the books: no output of it counts any more."""
        self._eager_ids.discard(request_id)
        return self._readers.pop(request_id, None)


class _Reader:
    """A request and the task that may be waiting for its next piece."""

    __slots__ = ('_waiter', 'live')

    def __init__(self, live: LiveRequest) -> None:
        self.live = live
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Returns as soon as there is a piece to take."""
        while not self.live.has_piece:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and self.live.has_piece:
            self._waiter.set_result(None)
