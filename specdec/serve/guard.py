"""What stands between the network and the routes: API keys, and bodies of a bearable size.

Next: api_server.py, whose routes it guards.
"""

import asyncio
import hashlib
import hmac
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from specdec.serve.answers import Message, Receive, Send
from specdec.serve.errors import ApiError, invalid_body

MAX_BODY_BYTES = 32 * 2**20
BODY_SECONDS = 60.0  # in which a request's body has to arrive
OPEN_PATHS = ('/', '/health', '/docs', '/openapi.json')
OPEN_PREFIXES = ('/page/',)

B = TypeVar('B', bound=BaseModel)


class ApiKeys:
    """ASGI middleware: a known key, compared in constant time, for everything but the page, its files and /health."""

    def __init__(self, app: Any, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope['type'] == 'http' and self._is_guarded(scope) and not self._knows(scope['headers']):
            error = ApiError(401, 'a valid API key is needed: Authorization: Bearer KEY', 'invalid_api_key')
            data = error.encoded()
            headers = [
                (b'content-type', b'application/json'),
                (b'content-length', str(len(data)).encode()),
                (b'www-authenticate', b'Bearer'),
            ]
            await send({'type': 'http.response.start', 'status': 401, 'headers': headers})
            await send({'type': 'http.response.body', 'body': data, 'more_body': False})
            return
        await self._app(scope, receive, send)

    @staticmethod
    def _is_guarded(scope: Message) -> bool:
        path = scope['path']
        return scope['method'] != 'OPTIONS' and path not in OPEN_PATHS and not path.startswith(OPEN_PREFIXES)

    def _knows(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = next((value for name, value in headers if name == b'authorization'), b'')
        kind, _, key = given.partition(b' ')
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, always
        return kind.lower() == b'bearer' and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def read_body(request: Request, kind: type[B]) -> B:
    """The body as `kind`. ApiError for one that is too large, too slow, no JSON, or not of that kind."""
    content_type = request.headers.get('content-type', '').partition(';')[0].strip().lower()
    if content_type != 'application/json':
        raise ApiError(400, 'Content-Type must be application/json', 'invalid_content_type')
    try:
        async with asyncio.timeout(BODY_SECONDS):
            data = await _read(request)
    except TimeoutError:
        raise ApiError(408, f'the body did not arrive within {BODY_SECONDS:g} s', 'request_timeout') from None
    except ClientDisconnect:
        raise ApiError(400, 'the client left before its body had arrived', 'client_disconnected') from None
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise invalid_body(error, kind, data) from None


async def _read(request: Request) -> bytes:
    declared = request.headers.get('content-length', '')
    too_large = ApiError(
        413, f'a body may have at most {MAX_BODY_BYTES} bytes', 'request_too_large', headers={'Connection': 'close'}
    )
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise too_large
        parts.append(part)
    return b''.join(parts)
