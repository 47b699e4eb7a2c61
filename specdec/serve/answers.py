"""Sends answers, streamed or whole, and frees their requests when the client leaves or does not read.

A response here is an ASGI application: it holds a place among the concurrent requests until it ends. Next:
api_server.py, whose routes return them.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import Response as HttpResponse

from specdec.engine.async_engine import AsyncEngine
from specdec.errors import CapacityError, RequestError, SpecdecError
from specdec.messages import Response
from specdec.serve.chunks import DONE, Answer, Choice, event, speculation_total
from specdec.serve.errors import ApiError, as_api_error, failed_response
from specdec.serve.text import dumps

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

STREAM_HEADERS = [
    (b'content-type', b'text/event-stream; charset=utf-8'),
    (b'cache-control', b'no-cache'),
    (b'x-accel-buffering', b'no'),
]
JSON_HEADERS = [(b'content-type', b'application/json')]
MAX_BLOCKED_SECONDS = 300.0  # a client that takes no byte for so long is given up
SWEEP_SECONDS = 10.0

logger = logging.getLogger('specdec')


class Admission:
    """How many requests may be under way, running, waiting or being sent; and who of them does not read."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_taken = 0
        self.sending: set[Sending] = set()
        self._mean_seconds = 1.0

    def take(self, count: int) -> None:
        """CapacityError if there is no room for `count` more; `give_back` them when they have ended."""
        if self.num_taken + count > self.limit:
            if count > self.limit:
                raise RequestError('prompt', f'{count} prompts', f'this server takes at most {self.limit} at once')
            remedy = f'{self.limit} requests are under way, which is the limit; try again later'
            raise CapacityError('requests', self.num_taken + count, remedy, min(60.0, self._mean_seconds))
        self.num_taken += count

    def give_back(self, count: int, seconds: float | None = None) -> None:
        self.num_taken -= count
        if seconds is not None:
            self._mean_seconds += (seconds - self._mean_seconds) / 8

    async def sweep(self) -> None:
        """Gives up, again and again, clients that have not read for too long."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            limit = time.monotonic() - MAX_BLOCKED_SECONDS
            for sending in [one for one in self.sending if one.blocked_since is not None]:
                if sending.blocked_since < limit:
                    logger.warning('a client takes nothing for %.0f s; its request ends', MAX_BLOCKED_SECONDS)
                    sending.give_up()


class Sending:
    """One HTTP answer on its way: `send` with a memory of since when it waits."""

    def __init__(self, send: Send, worker: 'asyncio.Task[None] | None' = None) -> None:
        self.blocked_since: float | None = None
        self.has_started = False
        self.worker = worker
        self._send = send

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_started = True
        await self._send({'type': 'http.response.start', 'status': status, 'headers': headers})

    async def body(self, data: bytes, more: bool = True) -> None:
        self.blocked_since = time.monotonic()
        await self._send({'type': 'http.response.body', 'body': data, 'more_body': more})
        self.blocked_since = None

    def give_up(self) -> None:
        if self.worker is not None:
            self.worker.cancel()


class EngineAnswer(HttpResponse):
    """The answer to one HTTP request, which may have several choices, each a request of the engine's."""

    def __init__(
        self, engine: AsyncEngine, admission: Admission, answer: Answer, choices: list[Choice], object_name: str,
        streams: bool, on_end: Callable[[], None],
    ) -> None:  # fmt: skip
        """`choices` were admitted; `on_end` is called when the answer has ended, however that came about."""
        super().__init__()
        self._engine, self._admission, self._answer, self._choices = engine, admission, answer, choices
        self._object_name, self._streams, self._on_end = object_name, streams, on_end
        self._begin = time.monotonic()

    async def __call__(self, _scope: Message, receive: Receive, send: Send) -> None:
        sending = Sending(send)
        sending.worker = worker = asyncio.create_task(self._run(sending))
        watcher = asyncio.create_task(_disconnected(receive))
        self._admission.sending.add(sending)
        seconds = None
        try:
            await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
            if worker.done() and not worker.cancelled():
                worker.result()
                seconds = time.monotonic() - self._begin
        finally:
            self._admission.sending.discard(sending)
            worker.cancel()
            watcher.cancel()
            await asyncio.gather(worker, watcher, return_exceptions=True)
            self._admission.give_back(len(self._choices), seconds)
            self._on_end()

    async def _run(self, sending: Sending) -> None:
        try:
            await (self._stream(sending) if self._streams else self._send_whole(sending))
        except (ApiError, SpecdecError) as error:
            await self._fail(sending, as_api_error(error))
        except Exception as error:
            logger.exception('request %s failed', self._answer.id)
            await self._fail(sending, as_api_error(error))

    async def _fail(self, sending: Sending, error: ApiError) -> None:
        if sending.has_started:
            await sending.body(event(dumps(error.body)) + DONE, more=False)
            return
        data = error.encoded()
        extra = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
        await sending.start(error.status, [*JSON_HEADERS, (b'content-length', str(len(data)).encode()), *extra])
        await sending.body(data, more=False)

    # ------------------------------------------------------------------------------------------------ streamed
    async def _stream(self, sending: Sending) -> None:
        if len(self._choices) == 1:
            await self._stream_choice(self._choices[0], sending)
        else:
            await _all([self._stream_choice(choice, sending) for choice in self._choices])
        end = DONE if self._answer.kind == 'gen' else self._answer.end(self._object_name)
        await sending.body(end, more=False)

    async def _stream_choice(self, choice: Choice, sending: Sending) -> None:
        """The status is sent with the first piece, so that what fails before it still gets its own."""
        pieces = self._engine.stream(choice.live)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                if piece.finish_reason == 'error':
                    raise failed_response(piece)
                if not sending.has_started:
                    await sending.start(200, STREAM_HEADERS)
                if data := choice.chunk(piece):
                    await sending.body(data)
                if piece.finish_reason is not None:
                    self._answer.usage.add(piece, choice.reasoning_tokens)

    # --------------------------------------------------------------------------------------------------- whole
    async def _send_whole(self, sending: Sending) -> None:
        responses = await _all([self._whole(choice) for choice in self._choices])
        if self._answer.kind == 'gen':
            value = self._choices[0].choice(responses[0])
            if self._answer.wishes.speculation:
                value['speculation'] = speculation_total(responses[0])
            data = dumps(value).encode()
        else:
            choices = []
            for choice, response in zip(self._choices, responses):
                choices.append(choice.choice(response))
                self._answer.usage.add(response, choice.reasoning_tokens)
            wanted = self._answer.wishes.speculation
            data = self._answer.whole(self._object_name, choices, _speculation(responses) if wanted else None)
        await sending.start(200, [*JSON_HEADERS, (b'content-length', str(len(data)).encode())])
        await sending.body(data, more=False)

    async def _whole(self, choice: Choice) -> Response:
        response = Response()
        pieces = self._engine.stream(choice.live)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                response.extend(piece)
        if response.finish_reason == 'error':
            raise failed_response(response)
        return response


def _speculation(responses: list[Response]) -> dict[str, Any]:
    total = Response()
    for response in responses:
        total.speculation = total.speculation + response.speculation
    return speculation_total(total)


async def _all(coroutines: list[Any]) -> list[Any]:
    """Their results; the first failure, or a cancellation, ends them all."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())['type'] != 'http.disconnect':
        pass
