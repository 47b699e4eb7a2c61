"""Everything that requests share: the engine, the tokenizer's work, names, limits, health. No HTTP in here.

Next: routes.py, which calls it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.engine.async_engine import AsyncEngine
from specdec.errors import ConfigError, EngineError, RequestError
from specdec.messages import EngineStats
from specdec.models.checkpoint import read_generation_defaults
from specdec.serve.answers import Admission
from specdec.serve.config import ServerConfig
from specdec.serve.errors import ApiError
from specdec.serve.fields import sampling_defaults
from specdec.serve.parsers.answer_parser import ParserFactory

MIN_CONCURRENT = 256
THREAD_CHARACTERS = 20_000  # text from which on it is encoded in a thread, so that streams go on meanwhile
POLL_SECONDS = 5.0
UNHEALTHY_SECONDS = 90.0  # as LMDeploy
LOG_SECONDS = 10.0

logger = logging.getLogger('specdec')


class Service:
    def __init__(
        self, config: ServerConfig, engine: AsyncEngine, defaults: Mapping[str, Any], settings: dict[str, str]
    ) -> None:
        """`defaults`: sampling settings of requests that bring none; `settings`: what /metrics says of the engine."""
        self.config, self.engine, self.defaults, self.settings = config, engine, defaults, settings
        self.model_name = config.model_name or engine.info.model_name
        self.created = int(time.time())
        self.admission = Admission(
            config.max_concurrent_requests or max(MIN_CONCURRENT, 4 * engine.info.max_batch_size)
        )
        self.parsers = ParserFactory(config.reasoning_parser, config.tool_call_parser)
        self.draining = False
        self._sessions: dict[int, list[int]] = {}  # session id -> request ids
        self._answers: dict[str, list[int]] = {}  # an answer's id -> request ids
        self._last_word = time.monotonic()

    # --------------------------------------------------------------------------------------------------- prompts
    async def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids; a long text is encoded in a thread."""
        self._check_length(text)
        encode = self.engine.tokenizer.encode
        if len(text) < THREAD_CHARACTERS:
            return encode(text, add_special)
        return await asyncio.to_thread(encode, text, add_special)

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, arguments: dict[str, Any]
    ) -> str:
        return self.engine.tokenizer.render_chat(messages, tools, **arguments)

    def _check_length(self, text: str) -> None:
        """Refuses at once what cannot fit: no token of a usual vocabulary has more than 512 characters."""
        session_len = self.engine.info.session_len
        if len(text) > 512 * session_len:
            remedy = f'cannot fit in session_len={session_len}; shorten it'
            raise RequestError('prompt', f'{len(text)} characters', remedy, 'context_length_exceeded')

    def check_model(self, name: str) -> None:
        if name != self.model_name:
            message = f'the model {name!r:.100} does not exist here; this server has {self.model_name!r}'
            raise ApiError(404, message, 'model_not_found', 'model')

    # ------------------------------------------------------------------------------------------- who can be aborted
    def register(self, answer_id: str, session_id: int | None, request_ids: list[int]) -> None:
        """ApiError 409 if the session is busy; `forget` when the answer has ended."""
        if session_id is not None and session_id >= 0:
            if session_id in self._sessions:
                raise ApiError(409, f'session {session_id} has a request under way', 'session_busy', 'session_id')
            self._sessions[session_id] = request_ids
        self._answers[answer_id] = request_ids

    def forget(self, answer_id: str, session_id: int | None) -> None:
        self._answers.pop(answer_id, None)
        if session_id is not None:
            self._sessions.pop(session_id, None)

    def abort(self, answer_id: str | None, session_id: int | None, everything: bool) -> int:
        """How many requests were ended."""
        wanted: list[int] = []
        if everything:
            wanted = [i for ids in self._answers.values() for i in ids]
        else:
            wanted += self._answers.get(answer_id or '', [])
            wanted += self._sessions.get(-1 if session_id is None else session_id, [])
        return sum(self.engine.abort(request_id) for request_id in dict.fromkeys(wanted))

    # ---------------------------------------------------------------------------------------------------- health
    def problem(self) -> str | None:
        """Why the server cannot serve, if so."""
        if self.engine.failure is not None:
            return str(self.engine.failure)
        silence = time.monotonic() - self._last_word
        if silence > UNHEALTHY_SECONDS:
            return f'the engine has not answered for {silence:.0f} s'
        return None

    async def stats(self, timeout: float = 10.0) -> EngineStats | None:
        """The engine's figures; None if it does not answer."""
        try:
            stats = await self.engine.stats(timeout)
        except EngineError:
            return None
        self._last_word = time.monotonic()
        return stats

    async def watch(self) -> None:
        """Asks after the engine, again and again, and logs how it does."""
        logged = time.monotonic()
        while self.engine.failure is None:
            await asyncio.sleep(POLL_SECONDS)
            stats = await self.stats(UNHEALTHY_SECONDS)
            if stats is not None and self.admission.num_taken and time.monotonic() - logged >= LOG_SECONDS:
                logged = time.monotonic()
                self._log(stats)

    def _log(self, stats: EngineStats) -> None:
        counted = self.engine.statistics
        usage = stats.num_pages_held / max(1, stats.num_pages)
        logger.info(
            'running %d, waiting %d, cache %.0f %%, generated %d; drafted %d, accepted %d, mean accepted length %.2f',
            stats.num_running, stats.num_waiting, 100 * usage, counted.emitted, counted.drafted, counted.accepted,
            counted.mean_accepted_length,
        )  # fmt: skip

    async def drain(self) -> None:
        """No new requests; those under way may end, and are aborted when their time is up."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.shutdown_seconds):
                while self.admission.num_taken:
                    await asyncio.sleep(0.05)
        if self.engine.num_live:
            logger.warning('%d requests are aborted: the server ends', self.engine.num_live)
        self.engine.abort_all()


def sampling_settings(config: ServerConfig, folder: str) -> dict[str, Any]:
    """Sampling defaults by --generation-config: 'auto', 'lmdeploy', or a folder. ConfigError for anything else."""
    if config.generation_config == 'lmdeploy':
        return {}
    place = Path(folder if config.generation_config == 'auto' else config.generation_config)
    if config.generation_config != 'auto' and not (place / 'generation_config.json').is_file():
        remedy = "'auto', 'lmdeploy', or a folder with a generation_config.json"
        raise ConfigError('generation_config', config.generation_config, remedy)
    defaults, refusals = sampling_defaults(read_generation_defaults(place))
    for refusal in refusals:
        logger.warning('generation_config.json is not followed in this: %s', refusal)
    return defaults
