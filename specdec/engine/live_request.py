"""A request between submission and its end: what the engine is told, and what its outputs become for the user.

Text is made, cut and counted here, without threads or loops, for the Python interface and the server alike.
Next: async_engine.py (many requests on an asyncio loop) and pipeline.py (plain threads), which feed it.
"""

import dataclasses
import itertools
import logging
import secrets
from collections.abc import Sequence

from specdec.engine.stops import StopStrings, TextStream
from specdec.engine.tokenizer import Tokenizer
from specdec.errors import RequestError
from specdec.messages import (
    GREEDY_TEMPERATURE,
    MAX_STOP_IDS,
    EngineInfo,
    EngineRequest,
    ErrorInfo,
    FinishReason,
    GenerationConfig,
    RequestOutput,
    Response,
    SamplingParams,
    SpeculationStats,
)

NUM_SEEDS = 2**64
StepCount = tuple[bool, int, int]  # a decode step (or the end of a prompt), drafted, accepted

logger = logging.getLogger('specdec')


class LiveRequest:
    """Collects one request's outputs and gives them out as Responses; what is not taken yet is merged into one."""

    __slots__ = (
        '_cached_tokens', '_error', '_ids', '_logprobs', '_num_accepted', '_num_drafted', '_num_ids', '_num_steps',
        '_shows_stop', '_steps', '_streams', '_text', '_text_stream', 'finish_reason', 'is_eager', 'request',
        'taken_all', 'taken_steps',
    )  # fmt: skip

    def __init__(
        self, request: EngineRequest, config: GenerationConfig, text_stream: TextStream, stream_response: bool
    ) -> None:
        """With `stream_response` a piece is there after every step, else only at the end."""
        self.request = request
        self.is_eager = stream_response or bool(config.stop_words)  # each output is wanted at once, not just the last
        self.finish_reason: FinishReason | None = None
        self.taken_all = False
        self._text_stream = text_stream
        self._streams = stream_response
        self._shows_stop = config.include_stop_str_in_output
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[dict[int, float]] = []
        self._num_ids = self._num_steps = self._num_drafted = self._num_accepted = self._cached_tokens = 0
        self._error: ErrorInfo | None = None
        self._steps: list[StepCount] = []
        self.taken_steps: list[StepCount] = []  # what the piece taken last is made of

    # -------------------------------------------------------------------------------------------------- filling
    def add(self, output: RequestOutput) -> int:
        """One step's output. A stop string ends the request here, even where the engine goes on.

        Returns how many tokens of it count as emitted: a stop token does, tokens beyond a stop string do not.
        """
        assert self.finish_reason is None, 'an ended request takes no output'
        self._cached_tokens = self._cached_tokens or output.cached_tokens
        self._error = output.error
        num_emitted, finish_reason = self._add_tokens(output) if output.token_ids else (0, output.finish_reason)
        if finish_reason is not None:
            self.end(finish_reason)
        return num_emitted

    def end(self, finish_reason: FinishReason) -> None:
        self._text.append(self._text_stream.finish())
        self.finish_reason = finish_reason

    def _add_tokens(self, output: RequestOutput) -> tuple[int, FinishReason | None]:
        """Takes the tokens up to the request's end; how many, and the reason why it ends with them, if it does."""
        token_ids, finish_reason = output.token_ids, output.finish_reason
        hides_stop = finish_reason == 'stop' and not self._shows_stop
        piece = self._text_stream.push(token_ids[:-1] if hides_stop else token_ids)
        num_shown = num_emitted = piece.num_tokens
        if piece.stopped:
            finish_reason = 'stop'
        elif hides_stop:
            num_emitted += 1
        self._text.append(piece.text)
        self._ids += token_ids[:num_shown]
        self._num_ids += num_shown
        if output.logprobs is not None:
            self._logprobs += output.logprobs[:num_shown]
        if output.decode:
            self._num_steps += 1
            self._num_drafted += output.drafted
            self._num_accepted += num_emitted - 1
        self._steps.append((output.decode, output.drafted, num_emitted - 1))
        return num_emitted, finish_reason

    # --------------------------------------------------------------------------------------------------- taking
    @property
    def has_piece(self) -> bool:
        return self.finish_reason is not None or (self._streams and bool(self._ids))

    def take(self) -> Response:
        """Everything since the last call, counts as totals; a streamed request's last piece has no text and no ids."""
        has_content = bool(self._ids) or any(self._text)
        self.taken_all = self.finish_reason is not None and not (self._streams and has_content)
        response = Response(
            text=''.join(self._text),
            generate_token_len=self._num_ids,
            input_token_len=len(self.request.prompt_ids),
            finish_reason=self.finish_reason if self.taken_all else None,
            token_ids=self._ids,
            logprobs=self._logprobs or None,
            cached_tokens=self._cached_tokens,
            seed=self.request.params.seed,
            speculation=SpeculationStats(self._num_steps, self._num_drafted, self._num_accepted),
        )
        if self.taken_all and self._error is not None:
            response.error_code, response.error_message = self._error.code, self._error.message
        self._text, self._ids, self._logprobs = [], [], []
        self.taken_steps, self._steps = self._steps, []
        return response


class RequestMaker:
    """Checks what users ask against the model, and settles what they left open."""

    def __init__(
        self, info: EngineInfo, tokenizer: Tokenizer, generation_defaults: GenerationConfig | None = None
    ) -> None:
        """`generation_defaults` serve requests that bring no settings of their own."""
        self._info, self._tokenizer = info, tokenizer
        self._defaults = generation_defaults or GenerationConfig()
        own_ids = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        self._eos_ids = tuple(i for i in dict.fromkeys((*info.eos_ids, *own_ids)) if i < info.vocab_size)
        self._request_ids = itertools.count(1)
        self._warned = False

    def new_request_id(self) -> int:
        return next(self._request_ids)

    def make(
        self,
        prompt_ids: Sequence[int],
        gen_config: GenerationConfig | None = None,
        stream_response: bool = True,
        request_id: int | None = None,
    ) -> LiveRequest:
        """A request ready to be submitted. RequestError names what cannot be served."""
        config = gen_config or self._defaults
        self._warn_of_idle_fields(config)
        params = resolve_sampling(self._info, self._eos_ids, prompt_ids, config)
        request_id = self.new_request_id() if request_id is None else request_id
        detokenizer = self._tokenizer.detokenizer(config.skip_special_tokens, config.spaces_between_special_tokens)
        stops = StopStrings(config.stop_words or (), config.include_stop_str_in_output)
        text_stream = TextStream(detokenizer, stops, params.min_new_tokens)
        return LiveRequest(EngineRequest(request_id, tuple(prompt_ids), params), config, text_stream, stream_response)

    def _warn_of_idle_fields(self, config: GenerationConfig) -> None:
        if self._warned or config.do_sample:
            return
        idle = [name for name, default in _SAMPLING_DEFAULTS.items() if _is_idle(name, getattr(config, name), default)]
        if idle:
            self._warned = True
            logger.warning('without effect, because do_sample=False decodes greedily: %s', ', '.join(idle))


def resolve_sampling(
    info: EngineInfo, eos_ids: Sequence[int], prompt_ids: Sequence[int], config: GenerationConfig
) -> SamplingParams:
    """The settings that the engine is told. RequestError for what only the model can tell: length and token ids.

    `max_new_tokens` None, or more than `session_len` leaves, becomes what it leaves. With `ignore_eos` the EOS ids are
    banned, except those that the request names as its own stop ids.
    """
    _check_prompt(info, prompt_ids)
    room = info.session_len - len(prompt_ids)
    max_new_tokens = room if config.max_new_tokens is None else min(config.max_new_tokens, room)
    own_stop_ids = tuple(config.stop_token_ids or ())
    _check_ids(info, 'stop_token_ids', own_stop_ids)
    stop_ids = tuple(dict.fromkeys(own_stop_ids if config.ignore_eos else (*eos_ids, *own_stop_ids)))
    if len(stop_ids) > MAX_STOP_IDS:
        remedy = f'at most {MAX_STOP_IDS} stop ids, the {len(eos_ids)} EOS ids of the model included'
        raise RequestError('stop_token_ids', f'{len(own_stop_ids)} ids', remedy)
    sampled = config.do_sample and config.temperature >= GREEDY_TEMPERATURE
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min(config.min_new_tokens or 0, max_new_tokens),
        temperature=config.temperature if sampled else 0.0,
        top_k=config.top_k if sampled and config.top_k < info.vocab_size else 0,
        top_p=config.top_p if sampled else 1.0,
        min_p=config.min_p if sampled else 0.0,
        seed=secrets.randbits(64) if config.random_seed is None else config.random_seed % NUM_SEEDS,
        stop_ids=stop_ids,
        banned_ids=tuple(i for i in eos_ids if i not in own_stop_ids) if config.ignore_eos else (),
        logprobs=config.logprobs,
        max_drafts=_max_drafts(info, config),
    )


def _check_prompt(info: EngineInfo, prompt_ids: Sequence[int]) -> None:
    if not prompt_ids:
        raise RequestError('prompt', '', 'is empty; give at least one token', 'empty_prompt')
    if len(prompt_ids) >= info.session_len:
        remedy = f'must leave room for an answer in session_len={info.session_len}; shorten it'
        raise RequestError('prompt', f'{len(prompt_ids)} tokens', remedy, 'context_length_exceeded')
    _check_ids(info, 'prompt', prompt_ids)


def _check_ids(info: EngineInfo, field: str, token_ids: Sequence[int]) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= info.vocab_size):
        wrong = next(i for i in token_ids if not 0 <= i < info.vocab_size)
        raise RequestError(field, wrong, f'token ids must lie in [0, {info.vocab_size})')


def _max_drafts(info: EngineInfo, config: GenerationConfig) -> int | None:
    if not config.speculative:
        return 0
    cap = config.num_speculative_tokens
    return None if cap is None else min(cap, info.num_drafts)


_SAMPLING_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(GenerationConfig)
    if field.name in ('temperature', 'top_p', 'top_k', 'min_p')
}


def _is_idle(name: str, value: float, default: float) -> bool:
    """Whether somebody set a sampling field in vain; temperature 0 and top_k 1 ask for greedy decoding themselves."""
    return value != default and (name, value) not in (('temperature', 0), ('top_k', 1))
