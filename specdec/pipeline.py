"""The Python interface, with LMDeploy's names: prompts in, Responses out, in order, batched, streamed or as a chat.

The engine runs in a thread of its own; everything else, text included, is done by the thread that calls, so that a step
costs one hop between threads and no loop. Next: engine/live_request.py, which turns outputs into Responses.
"""

import itertools
import logging
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdec.engine.client import Engine, EngineClient, ThreadClient, describe
from specdec.engine.live_request import LiveRequest, RequestMaker
from specdec.engine.logs import set_log_level
from specdec.errors import ConfigError, EngineError, RequestError
from specdec.messages import (
    ChatTemplateConfig,
    EngineInfo,
    FinishReason,
    GenerationConfig,
    PytorchEngineConfig,
    RequestOutput,
    Response,
    SpeculativeConfig,
)

if TYPE_CHECKING:
    from specdec.engine.tokenizer import Tokenizer

MAX_BACKLOG = 1024  # outputs that may wait for a request's end before they are worked off
NUM_PROMPTS_WITH_PROGRESS = 8  # from so many prompts on, a terminal shows a progress bar

logger = logging.getLogger('specdec')


def pipeline(
    model_path: str,
    backend_config: PytorchEngineConfig | None = None,
    chat_template_config: ChatTemplateConfig | None = None,
    log_level: str = 'WARNING',
    max_log_len: int | None = None,
    trust_remote_code: bool = False,
    speculative_config: SpeculativeConfig | None = None,
    allowed_media_domains: list[str] | None = None,
    **kwargs: Any,
) -> 'Pipeline':
    """Loads a model and makes it ready to be called: `pipeline('Qwen/Qwen3-8B')('Hello').text`.

    Args:
        model_path: folder in Hugging Face layout, a hub name, or 'demo' for the small packaged model.
        backend_config: how the engine runs (device, dtype, batch and context size, cache).
        chat_template_config: a chat template instead of the tokenizer's own.
        log_level: of the 'specdec' logger.
        max_log_len: characters of a prompt that are logged at level INFO; None = all.
        trust_remote_code: accepted for compatibility; no code of a checkpoint ever runs.
        speculative_config: the draft; None decodes plainly.
        allowed_media_domains: leave at None, models here read text only.

    Raises ConfigError or CheckpointError before any work starts; unknown keywords are refused.
    """
    return Pipeline(
        model_path,
        backend_config,
        chat_template_config,
        log_level,
        max_log_len,
        trust_remote_code,
        speculative_config,
        allowed_media_domains,
        **kwargs,
    )


class Session:
    """One conversation: `history` holds (prompt, answer) pairs, `response` the last answer."""

    def __init__(self, abort_request: Callable[[int], None]) -> None:
        self.history: list[tuple[str, str]] = []
        self.prompt: str | None = None
        self.response: Response | None = None
        self._abort_request = abort_request
        self._request_id: int | None = None

    def abort(self) -> None:
        """Ends the running answer with finish_reason 'abort'; may be called from another thread."""
        if self._request_id is not None:
            self._abort_request(self._request_id)

    def reset(self) -> None:
        """Forgets the conversation."""
        self.history, self.prompt, self.response = [], None, None

    def close(self) -> None:
        self.abort()
        self.reset()

    def messages(self, prompt: Any) -> list[dict[str, Any]]:
        """The conversation so far and the next prompt, as OpenAI messages."""
        turns = itertools.chain.from_iterable((('user', asked), ('assistant', said)) for asked, said in self.history)
        return [{'role': role, 'content': content} for role, content in (*turns, ('user', prompt))]


class Pipeline:
    """A loaded model. Made by `pipeline()`; close it, or use it in a `with` statement."""

    def __init__(
        self,
        model_path: str,
        backend_config: PytorchEngineConfig | None = None,
        chat_template_config: ChatTemplateConfig | None = None,
        log_level: str = 'WARNING',
        max_log_len: int | None = None,
        trust_remote_code: bool = False,
        speculative_config: SpeculativeConfig | None = None,
        allowed_media_domains: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """See `pipeline`."""
        _refuse_unknown('pipeline', kwargs)
        _expect('model_path', model_path, str)
        _expect('backend_config', backend_config, PytorchEngineConfig, None)
        _expect('chat_template_config', chat_template_config, ChatTemplateConfig, None)
        _expect('speculative_config', speculative_config, SpeculativeConfig, None)
        _expect('max_log_len', max_log_len, int, None)
        _expect('trust_remote_code', trust_remote_code, bool)
        if allowed_media_domains is not None:
            raise ConfigError(
                'allowed_media_domains', allowed_media_domains, 'models here read text only; leave it out'
            )
        set_log_level(log_level)
        from specdec.engine.build import build_engine
        from specdec.engine.tokenizer import Tokenizer
        from specdec.models.hub import find_target

        config = backend_config or PytorchEngineConfig()
        # before the weights, which take longer to load
        tokenizer = Tokenizer.load(find_target(model_path, config.revision, config.download_dir), chat_template_config)
        with _loading_bar() as progress:
            engine = build_engine(model_path, config, speculative_config, progress)
        self._open(engine, tokenizer, max_log_len)

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: 'Tokenizer', max_log_len: int | None = None) -> 'Pipeline':
        """A pipeline over an engine that exists already; it takes the engine over and closes it."""
        self = cls.__new__(cls)
        self._open(engine, tokenizer, max_log_len)
        return self

    def _open(self, engine: Engine, tokenizer: 'Tokenizer', max_log_len: int | None) -> None:
        self.info: EngineInfo = engine.info
        self.tokenizer = tokenizer
        self._max_log_len = max_log_len
        self._client = ThreadClient(engine)
        self._maker = RequestMaker(engine.info, tokenizer, self._client.set_vocabulary)
        self._dispatcher = _Dispatcher()
        self._client.start(self._dispatcher)
        self._finalizer = weakref.finalize(self, _shut_down, self._client, self._dispatcher)

    def close(self) -> None:
        """Ends what is running (finish_reason 'abort') and frees the model."""
        self._finalizer()

    def __enter__(self) -> 'Pipeline':
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------- generation
    def infer(
        self,
        prompts: Any,
        gen_config: GenerationConfig | list[GenerationConfig] | None = None,
        do_preprocess: bool = True,
        adapter_name: None = None,
        use_tqdm: bool | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Answers one prompt with a Response, several with a list of them in the same order.

        With `GenerationConfig.n` > 1 a prompt is answered with the list of its n Responses instead.

        Args:
            prompts: text, OpenAI messages, or an iterable of either, which is read as slots become free.
            gen_config: settings for all prompts, or a list with one for each; None decodes greedily.
            do_preprocess: True renders the chat template, around plain text too; False encodes text as it is.
            adapter_name: leave at None.
            use_tqdm: a progress bar on stderr; None shows one for many prompts on a terminal.
            tools, enable_thinking, chat_template_kwargs: handed to the chat template.

        A prompt that cannot be served never raises: its Response has finish_reason 'error' and says why. So have those
        that were under way when the engine failed (error_code 'engine_error'); every later call raises EngineError.
        """
        _refuse_unknown('infer', kwargs)
        form = _PromptForm(do_preprocess, tools, _template_arguments(enable_thinking, chat_template_kwargs))
        _refuse_adapter(adapter_name)
        batch, is_single = _as_batch(prompts)
        requests = self._requests(batch, gen_config, form, None)
        answers: dict[int, list[Response]] = {}
        total = len(batch) if isinstance(batch, (list, tuple)) else None
        with _progress_bar(total, use_tqdm) as advance:
            for response in self._run(requests, stream_response=False):
                answers.setdefault(response.index, []).append(response)
                if len(answers[response.index]) == 1:
                    advance()
        found = [_as_answer(answers[index], gen_config) for index in range(len(answers))]
        return found[0] if is_single else found

    __call__ = infer
    batch_infer = infer

    def stream_infer(
        self,
        prompts: Any,
        sessions: Session | list[Session] | None = None,
        gen_config: GenerationConfig | list[GenerationConfig] | None = None,
        do_preprocess: bool = True,
        adapter_name: None = None,
        stream_response: bool = True,
        *,
        tools: list[dict[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Iterator[Response]:
        """As `infer`, but yields pieces as they come; `Response.index` says which prompt a piece belongs to.

        With `GenerationConfig.n` > 1, `Response.choice` says which of the prompt's answers it belongs to.

        A piece has only the new text and ids; a prompt's last piece has none, but the finish_reason. Counts and
        speculation figures are totals so far. Closing the iterator aborts what is running. `sessions` may be given to
        abort single prompts.
        """
        _refuse_unknown('stream_infer', kwargs)
        form = _PromptForm(do_preprocess, tools, _template_arguments(enable_thinking, chat_template_kwargs))
        _refuse_adapter(adapter_name)
        batch, _ = _as_batch(prompts)
        return self._run(self._requests(batch, gen_config, form, sessions), stream_response)

    def chat(
        self,
        prompt: str,
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        stream_response: bool = False,
        adapter_name: None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Session | Iterator[Response]:
        """The next turn of a conversation. Returns the session (a new one by default), or the answer's pieces.

        The pair joins `session.history` when the answer has ended; an exception, or closing the iterator, aborts it.
        """
        _refuse_unknown('chat', kwargs)
        form = _PromptForm(True, tools, _template_arguments(enable_thinking, chat_template_kwargs))
        _refuse_adapter(adapter_name)
        if gen_config is not None and gen_config.n != 1:
            raise RequestError('n', gen_config.n, 'a conversation goes on with one answer')
        session = session or self.session()
        pieces = self._chat_pieces(prompt, session, gen_config, form, stream_response)
        if stream_response:
            return pieces
        for _ in pieces:
            pass
        return session

    def session(self) -> Session:
        """A new conversation for `chat`."""
        return Session(self._abort)

    def get_ppl(self, *_: Any, **__: Any) -> None:
        """Not served here."""
        raise ConfigError('get_ppl', '...', 'scoring of prompts is not served here')

    def get_reward_score(self, *_: Any, **__: Any) -> None:
        """Not served here."""
        raise ConfigError('get_reward_score', '...', 'reward models are not served here')

    # ------------------------------------------------------------------------------------------------ requests
    def _requests(
        self,
        prompts: Iterable[Any],
        gen_config: GenerationConfig | list[GenerationConfig] | None,
        form: '_PromptForm',
        sessions: Session | list[Session] | None,
    ) -> Iterator['_Request']:
        configs = _one_for_each('gen_config', gen_config, GenerationConfig, prompts)
        owners = _one_for_each('sessions', sessions, Session, prompts)
        return (
            _Request(index, self._maker.new_request_id(), prompt, form, config, session)
            for index, (prompt, config, session) in enumerate(zip(prompts, configs, owners))
        )

    def _run(self, requests: Iterator['_Request'], stream_response: bool) -> Iterator[Response]:
        """Keeps at most `max_batch_size` requests in flight and yields their pieces as they come."""
        self._check_usable()
        run = _Run(self._client, self._dispatcher)
        try:
            while True:
                while run.num_live < self.info.max_batch_size and (request := next(requests, None)) is not None:
                    refusal = self._start(run, request, stream_response)
                    if refusal is not None:
                        yield refusal
                if run.num_live == 0:
                    return
                yield from run.next_pieces()
        finally:
            run.close()

    def _start(self, run: '_Run', request: '_Request', stream_response: bool) -> Response | None:
        """Encodes a prompt and submits it; an error Response if it cannot be served."""
        prompt_ids: list[int] = []
        try:
            prompt_ids = request.form.encode(self.tokenizer, request.prompt)
            lives = self._maker.make_choices(prompt_ids, request.config, stream_response, request.request_id)
            if logger.isEnabledFor(logging.INFO):
                shown = str(request.prompt)[: self._max_log_len]
                logger.info('request %d: %d tokens: %r', request.request_id, len(prompt_ids), shown)
            if request.session is not None:
                request.session._request_id = request.request_id
            for live in lives:
                run.start(live, request.index)
        except RequestError as error:
            return _error_response(request.index, error.code, error, len(prompt_ids))
        except EngineError as error:
            return _error_response(request.index, 'engine_error', error, len(prompt_ids))
        return None

    def _chat_pieces(
        self,
        prompt: str,
        session: Session,
        gen_config: GenerationConfig | None,
        form: '_PromptForm',
        stream_response: bool,
    ) -> Iterator[Response]:
        session.prompt, session.response = prompt, Response()
        requests = self._requests([session.messages(prompt)], gen_config, form, session)
        for piece in self._run(requests, stream_response):
            session.response.extend(piece)
            if piece.finish_reason not in (None, 'error'):
                session.history.append((prompt, session.response.text))
            yield piece

    def _abort(self, request_id: int) -> None:
        if self._dispatcher.end(request_id, 'abort'):
            self._client.abort((request_id,))

    def _check_usable(self) -> None:
        if not self._finalizer.alive:
            raise EngineError('the pipeline is closed')
        if (failure := self._client.failure) is not None:
            raise EngineError(f'the engine has failed: {describe(failure)}') from failure


@dataclass(frozen=True, slots=True)
class _PromptForm:
    """How prompts become token ids."""

    do_preprocess: bool
    tools: list[dict[str, Any]] | None
    template_arguments: dict[str, Any] = field(default_factory=dict)

    def encode(self, tokenizer: 'Tokenizer', prompt: Any) -> list[int]:
        """RequestError for what is neither text nor messages, and for what cannot be rendered."""
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError('prompt', prompt, 'is empty; give at least one token', 'empty_prompt')
            if not (self.do_preprocess and tokenizer.has_chat_template):
                return tokenizer.encode(prompt)
            prompt = [{'role': 'user', 'content': prompt}]
        elif isinstance(prompt, tuple):
            raise RequestError('prompt', prompt, 'images cannot be served; give text or messages')
        elif not _is_messages(prompt):
            raise RequestError('prompt', prompt, 'must be text, or a list of messages with a role and a content')
        elif not self.do_preprocess:
            raise RequestError('do_preprocess', False, 'messages need the chat template; give plain text')
        return tokenizer.encode_chat(prompt, self.tools, **self.template_arguments)


@dataclass(frozen=True, slots=True)
class _Request:
    index: int
    request_id: int
    prompt: Any
    form: _PromptForm
    config: GenerationConfig | None
    session: Session | None


class _Run:
    """The requests of one call, between the engine's thread, which brings outputs, and the thread that reads them."""

    def __init__(self, client: EngineClient, dispatcher: '_Dispatcher') -> None:
        self._client, self._dispatcher = client, dispatcher
        self._live: dict[int, tuple[int, LiveRequest]] = {}  # the reading thread's: index and request by request id
        self._outputs: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
        self._backlog: list[RequestOutput] = []
        self._backlog_lock = threading.Lock()
        self._is_eager = False

    # ---------------------------------------------------------------------------------------- the reading thread
    @property
    def num_live(self) -> int:
        return len(self._live)

    def start(self, live: LiveRequest, index: int) -> None:
        request_id = live.request.request_id
        self._is_eager = self._is_eager or live.is_eager
        self._dispatcher.runs[request_id] = self  # before the engine, or somebody who closes it, can know of it
        try:
            self._client.submit(live.request)
        except BaseException:
            del self._dispatcher.runs[request_id]
            raise
        self._live[request_id] = index, live

    def next_pieces(self) -> Iterator[Response]:
        """Waits for the next step's outputs and yields what they give."""
        for output in self._outputs.get():
            index, live = self._live.get(output.request_id, (0, None))
            if live is None:  # ended before the engine knew: by a stop string or an abort
                continue
            live.add(output)
            if live.finish_reason is not None:
                self._forget(output)
            while live.has_piece and not live.taken_all:
                piece = live.take()
                piece.index = index
                yield piece

    def close(self) -> None:
        """Aborts what is still running."""
        for request_id in self._live:
            self._dispatcher.runs.pop(request_id, None)
        if self._live:
            self._client.abort(tuple(self._live))
        self._live = {}

    def _forget(self, output: RequestOutput) -> None:
        del self._live[output.request_id]
        self._dispatcher.runs.pop(output.request_id, None)
        if output.finish_reason is None:
            self._client.abort((output.request_id,))

    # ------------------------------------------------------------------------------------------- other threads
    def put(self, outputs: list[RequestOutput]) -> None:
        """Wakes the reader only for what cannot wait for its request's end."""
        with self._backlog_lock:
            self._backlog += outputs
            is_due = self._is_eager or len(self._backlog) > MAX_BACKLOG
            if is_due or any(output.finish_reason is not None for output in outputs):
                self._outputs.put(self._backlog)
                self._backlog = []


class _Dispatcher:
    """Called on the engine's thread, once a step: brings every output to the run that waits for it."""

    def __init__(self) -> None:
        self.runs: dict[int, _Run] = {}  # by request id

    def __call__(self, outputs: list[RequestOutput]) -> None:
        by_run: dict[_Run, list[RequestOutput]] = {}
        for output in outputs:
            run = self.runs.get(output.request_id)
            if run is not None:
                by_run.setdefault(run, []).append(output)
        for run, own_outputs in by_run.items():
            run.put(own_outputs)

    def end(self, request_id: int, finish_reason: FinishReason) -> bool:
        """Ends a request in the engine's stead; False if it has ended already."""
        run = self.runs.pop(request_id, None)
        if run is not None:
            run.put([RequestOutput(request_id, finish_reason=finish_reason)])
        return run is not None


def _shut_down(client: EngineClient, dispatcher: _Dispatcher) -> None:
    """Ends the engine, then what was running (finish_reason 'abort'), so that no reader waits for ever."""
    client.close()
    for request_id in tuple(dispatcher.runs):
        dispatcher.end(request_id, 'abort')


def _error_response(index: int, code: str, message: object, num_prompt_ids: int = 0) -> Response:
    return Response(
        index=index,
        input_token_len=num_prompt_ids,
        finish_reason='error',
        error_code=code,
        error_message=str(message),
    )


def _as_answer(
    responses: list[Response], gen_config: GenerationConfig | list[GenerationConfig] | None
) -> Response | list[Response]:
    """One prompt's Response, or the list of them where several were asked for."""
    config = gen_config[responses[0].index] if isinstance(gen_config, (list, tuple)) else gen_config
    if config is None or config.n == 1:
        return responses[0]
    return sorted(responses, key=lambda response: response.choice)


def _as_batch(prompts: Any) -> tuple[Iterable[Any], bool]:
    """The prompts as an iterable, and whether they were a single one."""
    if isinstance(prompts, str) or _is_messages(prompts) or (isinstance(prompts, tuple) and len(prompts) == 2):
        return [prompts], True
    if isinstance(prompts, (dict, bytes)) or not isinstance(prompts, Iterable):
        raise RequestError('prompts', prompts, 'must be text, messages (a list of dicts), or several of these')
    return prompts, False


def _is_messages(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def _one_for_each(name: str, value: Any, kind: type, prompts: Iterable[Any]) -> Iterable[Any]:
    """`value` for every prompt, or its own one for each; RequestError if the numbers differ."""
    if value is None or isinstance(value, kind):
        return itertools.repeat(value)
    if not isinstance(value, Sequence) or not all(isinstance(one, kind) for one in value):
        hint = '; settings go by name: gen_config=...' if isinstance(value, GenerationConfig) else ''
        raise RequestError(name, value, f'must be a {kind.__name__}, or a list of them{hint}')
    if not isinstance(prompts, Sequence):
        raise RequestError(name, f'{len(value)} of them', 'a list of settings needs a list of prompts')
    if len(value) != len(prompts):
        raise RequestError(name, f'{len(value)} of them', f'there are {len(prompts)} prompts; give as many')
    return value


def _template_arguments(enable_thinking: bool | None, more: dict[str, Any] | None) -> dict[str, Any]:
    return ({} if enable_thinking is None else {'enable_thinking': enable_thinking}) | (more or {})


def _refuse_unknown(function: str, kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        raise ConfigError(name, value, f'{function}() has no such argument')


def _refuse_adapter(adapter_name: Any) -> None:
    if adapter_name is not None:
        raise ConfigError('adapter_name', adapter_name, 'adapters are not served here; leave it at None')


def _expect(name: str, value: Any, *kinds: type | None) -> None:
    if not any(value is None if kind is None else isinstance(value, kind) for kind in kinds):
        names = ' or '.join('None' if kind is None else kind.__name__ for kind in kinds)
        raise ConfigError(name, value, f'must be {names}')


@contextmanager
def _loading_bar() -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar on stderr for each model that is loaded, on a terminal; called with its name, bytes done, bytes in all."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress

    with Progress(*Progress.get_default_columns()[:2], DownloadColumn(), console=Console(stderr=True)) as progress:
        tasks: dict[str, Any] = {}

        def update(name: str, num_done: int, num_bytes: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(f'loading {name}')
            progress.update(tasks[name], completed=num_done, total=num_bytes)

        yield update


@contextmanager
def _progress_bar(total: int | None, wanted: bool | None) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, if it is wanted, or nobody minds and there is much to do on a terminal."""
    if wanted is None:
        wanted = total is not None and total >= NUM_PROMPTS_WITH_PROGRESS and sys.stderr.isatty()
    if not wanted:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task('prompts', total=total)
        yield lambda: progress.advance(task)
