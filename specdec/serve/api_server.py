"""The server: FastAPI and uvicorn in this process, the engine in another (engine/process_client.py).

`serve` is what `specdec serve api_server` calls. Next: routes.py, the endpoints.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.responses import Response as HttpResponse

from specdec.engine.async_engine import AsyncEngine
from specdec.engine.client import EngineClient
from specdec.engine.tokenizer import Tokenizer
from specdec.errors import SpecdecError
from specdec.messages import ChatTemplateConfig
from specdec.serve import openapi
from specdec.serve.config import ServerConfig
from specdec.serve.errors import ApiError, as_api_error
from specdec.serve.guard import ApiKeys
from specdec.serve.routes import router
from specdec.serve.service import Service, sampling_settings
from specdec.version import __version__

PAGE = Path(str(files('specdec.serve'))) / 'page'
MEDIA_TYPES = {
    '.html': 'text/html; charset=utf-8',
    '.js': 'text/javascript',
    '.css': 'text/css',
    '.svg': 'image/svg+xml',
}
GRACE_SECONDS = 5.0  # after running requests were aborted, for their last words

logger = logging.getLogger('specdec')


def create_app(
    client: EngineClient,
    config: ServerConfig,
    chat_template: ChatTemplateConfig | None = None,
    settings: dict[str, str] | None = None,
    tokenizer: Tokenizer | None = None,
) -> FastAPI:
    """The application around an engine that runs; it starts the client, and closes it when it shuts down.

    `tokenizer`: the engine's model's, if it is loaded already, with the chat template that shall be used.
    """
    tokenizer = tokenizer or Tokenizer.load(client.info.folder, chat_template)
    engine = AsyncEngine(client, tokenizer)
    service = Service(config, engine, sampling_settings(config, client.info.folder), settings or {})

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        tasks = [asyncio.create_task(service.watch()), asyncio.create_task(service.admission.sweep())]
        yield
        for task in tasks:
            task.cancel()
        engine.close()

    app = FastAPI(
        title='specdec',
        version=__version__,
        description='Block speculative decoding behind an OpenAI-compatible interface.',
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=lifespan,
    )
    app.state.service = service
    app.include_router(router)
    _add_pages(app, config)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ApiError, _own_error)
    app.add_exception_handler(SpecdecError, _own_error)
    app.add_exception_handler(Exception, _unexpected_error)
    if config.api_keys:
        app.add_middleware(ApiKeys, keys=config.api_keys)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=config.allow_origins,
        allow_methods=config.allow_methods,
        allow_headers=config.allow_headers,
        allow_credentials=config.allow_credentials,
    )
    return app


def _add_pages(app: FastAPI, config: ServerConfig) -> None:
    def file(name: str) -> HttpResponse:
        path = PAGE / name
        headers = {'Cache-Control': 'no-cache'}
        return HttpResponse(path.read_bytes(), media_type=MEDIA_TYPES[path.suffix], headers=headers)

    @app.get('/', include_in_schema=False)
    async def page() -> HttpResponse:
        return file('index.html')

    @app.get('/page/{name}', include_in_schema=False)
    async def part(name: str) -> HttpResponse:
        if name not in {path.name for path in PAGE.iterdir() if path.suffix in MEDIA_TYPES}:
            raise HTTPException(404, 'no such file')
        return file(name)

    if not config.disable_fastapi_docs:

        @app.get('/openapi.json', include_in_schema=False)
        async def schema() -> dict[str, Any]:
            return openapi.document(app)

        @app.get('/docs', include_in_schema=False)
        async def docs() -> HttpResponse:
            return file('docs.html')


async def _http_error(_request: Request, error: HTTPException) -> HttpResponse:
    code = {404: 'not_found', 405: 'method_not_allowed'}.get(error.status_code)
    return _respond(ApiError(error.status_code, str(error.detail), code, headers=dict(error.headers or {})))


async def _own_error(_request: Request, error: Exception) -> HttpResponse:
    return _respond(as_api_error(error))


async def _unexpected_error(request: Request, error: Exception) -> HttpResponse:
    logger.error('%s %s failed', request.method, request.url.path, exc_info=error)
    return _respond(as_api_error(error))


def _respond(error: ApiError) -> HttpResponse:
    return HttpResponse(error.encoded(), error.status, error.headers, media_type='application/json')


class Server(uvicorn.Server):
    """uvicorn, but running requests get a bounded time to end, and a proper last word if it does not suffice."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain = asyncio.create_task(self._service.drain())
        await super().shutdown(sockets)
        drain.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGTERM:
            self.force_exit = True  # asked twice: no waiting
        super().handle_exit(sig, frame)


def run(app: FastAPI, config: ServerConfig, listener: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT; returns when everything has ended."""
    settings = uvicorn.Config(
        app,
        log_level='warning',
        access_log=False,
        timeout_keep_alive=config.keep_alive_seconds,
        timeout_graceful_shutdown=int(config.shutdown_seconds + GRACE_SECONDS),
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ws='none',
        server_header=False,
        backlog=2048,
    )
    server = Server(settings, app.state.service)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in handlers:
        signal.signal(number, _ignore_second_delivery)
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _ignore_second_delivery(_number: int, _frame: FrameType | None) -> None:
    """uvicorn raises the signal that ended it once more, for those who would die of it; here it ends in peace."""
