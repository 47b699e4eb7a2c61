"""A request between submission and its end: what the engine is told, and what its outputs become for the user.

Text is made, cut and counted here, without threads or loops, for the Python interface and the server alike.
Next: async_engine.py (many requests on an asyncio loop) and pipeline.py (plain threads), which feed it.
"""

import dataclasses
import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from specdec.engine.checks import check_draft_sampling, check_ids, check_prompt, check_response_format
from specdec.engine.stops import RepetitionStop, StopStrings, TextStream
from specdec.engine.tokenizer import Tokenizer
from specdec.errors import RequestError
from specdec.messages import (
    GREEDY_TEMPERATURE,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BANNED_IDS,
    MAX_STOP_IDS,
    EngineInfo,
    EngineRequest,
    ErrorInfo,
    FinishReason,
    GenerationConfig,
    GrammarVocabulary,
    RequestOutput,
    Response,
    SamplingParams,
    SpeculationStats,
)

if TYPE_CHECKING:
    from specdec.engine.grammar import GrammarCompiler

NUM_SEEDS = 2**64
MAX_THINK_TAIL = 8  # tokens at a prompt's end among which its template's opening mark is looked for
THINK_MARKS = ('<think>', '</think>')  # around a reasoning section, each one token
StepCount = tuple[bool, int, int]  # a decode step (or the end of a prompt), drafted, accepted

logger = logging.getLogger('specdec')


class LiveRequest:
    """Collects one request's outputs and gives them out as Responses; what is not taken yet is merged into one."""

    __slots__ = (
        '_cached_tokens', '_error', '_ids', '_logprobs', '_num_accepted', '_num_drafted', '_num_ids', '_num_steps',
        '_shows_stop', '_steps', '_streams', '_text', '_text_stream', 'choice', 'finish_reason', 'is_eager', 'request',
        'taken_all', 'taken_steps',
    )  # fmt: skip

    def __init__(
        self,
        request: EngineRequest,
        config: GenerationConfig,
        text_stream: TextStream,
        stream_response: bool,
        choice: int = 0,
    ) -> None:
        """With `stream_response` a piece is there after every step, else only at the end. `choice`: which of n."""
        self.request, self.choice = request, choice
        # each output is wanted at once, not just the last
        self.is_eager = stream_response or bool(config.stop_words) or config.repetition_ngram_size > 0
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
        """One step's output. A stop string or a repetition ends the request here, even where the engine goes on.

        Returns how many tokens of it count as emitted: a stop token does, tokens beyond such an end do not.
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
            choice=self.choice,
        )
        if self.taken_all and self._error is not None:
            response.error_code, response.error_message = self._error.code, self._error.message
        self._text, self._ids, self._logprobs = [], [], []
        self.taken_steps, self._steps = self._steps, []
        return response


class RequestMaker:
    """Checks what users ask against the model, and settles what they left open."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer,
        on_vocabulary: Callable[[GrammarVocabulary], None],
        generation_defaults: GenerationConfig | None = None,
    ) -> None:
        """`on_vocabulary` is called before the first request that has a grammar leaves here; `generation_defaults`
        serve requests that bring no settings of their own.
        """
        self._info, self._tokenizer, self._on_vocabulary = info, tokenizer, on_vocabulary
        self._defaults = generation_defaults or GenerationConfig()
        own_ids = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        self._eos_ids = tuple(i for i in dict.fromkeys((*info.eos_ids, *own_ids)) if i < info.vocab_size)
        self._grammars: GrammarCompiler | None = None
        self._request_ids = itertools.count(1)
        self._warned = self._has_vocabulary = False
        self._lock = threading.Lock()  # of the grammars

    def new_request_id(self) -> int:
        return next(self._request_ids)

    def make(
        self,
        prompt_ids: Sequence[int],
        gen_config: GenerationConfig | None = None,
        stream_response: bool = True,
        request_id: int | None = None,
    ) -> LiveRequest:
        """A request ready to be submitted. RequestError names what cannot be served; so does more than one choice."""
        config = gen_config or self._defaults
        if config.n != 1:
            raise RequestError('n', config.n, 'one answer is wanted here')
        return self.make_choices(prompt_ids, config, stream_response, request_id)[0]

    def make_choices(
        self,
        prompt_ids: Sequence[int],
        gen_config: GenerationConfig | None = None,
        stream_response: bool = True,
        request_id: int | None = None,
    ) -> list[LiveRequest]:
        """The n requests of one prompt, `request_id` being the first one's; choice i has seed + i.

        All but the first wait for its prompt to be computed, so that they find its pages.
        """
        config = gen_config or self._defaults
        self._warn_of_idle_fields(config)
        params = self._resolve(prompt_ids, config)
        first_id = self.new_request_id() if request_id is None else request_id
        lives = []
        for choice in range(config.n):
            own = dataclasses.replace(params, seed=(params.seed + choice) % NUM_SEEDS) if choice else params
            own_id, after = (self.new_request_id(), first_id) if choice else (first_id, None)
            request = EngineRequest(own_id, tuple(prompt_ids), own, after)
            lives.append(LiveRequest(request, config, self._text_stream(config, params), stream_response, choice))
        return lives

    def prepare(self, gen_config: GenerationConfig) -> None:
        """Compile its response_format ahead, where that takes long; RequestError if it is not valid."""
        if gen_config.response_format is not None:
            self._compile(gen_config.response_format)

    def _compile(self, response_format: dict[str, Any]) -> str | None:
        """The format's grammar; the engine is told of the vocabulary with the first one."""
        from specdec.engine.grammar import GrammarCompiler

        check_response_format(response_format)
        if self._has_vocabulary and self._grammars is not None:
            found = self._grammars.find(response_format)
            if found is not None:
                return found  # without waiting for what somebody else has compiled
        with self._lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(self._tokenizer, self._info.vocab_size, self._eos_ids)
            grammar = self._grammars.compile(response_format)
            if not self._has_vocabulary and self._grammars.vocabulary is not None:
                self._on_vocabulary(self._grammars.vocabulary)
                self._has_vocabulary = True
        return grammar

    def _text_stream(self, config: GenerationConfig, params: SamplingParams) -> TextStream:
        detokenizer = self._tokenizer.detokenizer(config.skip_special_tokens, config.spaces_between_special_tokens)
        stops = StopStrings(config.stop_words or (), config.include_stop_str_in_output)
        repetition = RepetitionStop(config.repetition_ngram_size, config.repetition_ngram_threshold)
        return TextStream(detokenizer, stops, params.min_new_tokens, repetition)

    def _resolve(self, prompt_ids: Sequence[int], config: GenerationConfig) -> SamplingParams:
        """The engine's settings, with what it takes a tokenizer to know."""
        params = resolve_sampling(self._info, self._eos_ids, prompt_ids, config)
        banned_words, bad_words = self._bad_words(config.bad_words or ())
        banned_ids = tuple(dict.fromkeys((*params.banned_ids, *banned_words)))
        if len(banned_ids) > MAX_BANNED_IDS:
            num_words, num_ids = len(set(banned_words)), len(set(config.bad_token_ids or ()))
            num_eos = len(set(params.banned_ids)) - num_ids
            remedy = (
                f'at most {MAX_BANNED_IDS} in all; {num_words} of bad_words (a word counts again behind a space), '
                f'{num_ids} of bad_token_ids and {max(num_eos, 0)} of ignore_eos; name fewer'
            )
            field = 'bad_words' if num_words else 'bad_token_ids'
            raise RequestError(field, f'{len(banned_ids)} forbidden tokens', remedy)
        if params.allowed_ids and set(params.allowed_ids) <= set(banned_ids):
            remedy = 'all of them are ruled out by bad_token_ids, bad_words or ignore_eos'
            raise RequestError('allowed_token_ids', config.allowed_token_ids, remedy)
        grammar = None if config.response_format is None else self._compile(config.response_format)
        think_ids = self._think_ids()
        reasoning_open = think_ids is not None and self._ends_in_reasoning(prompt_ids, think_ids)
        if config.thinking_budget is not None and think_ids is None:
            raise RequestError(
                'thinking_budget', config.thinking_budget, 'this model has no tokens around its reasoning'
            )
        return dataclasses.replace(
            params,
            banned_ids=banned_ids,
            bad_words=bad_words,
            think_ids=think_ids,
            grammar=grammar,
            reasoning_open=reasoning_open,
        )

    def _ends_in_reasoning(self, prompt_ids: Sequence[int], think_ids: tuple[int, int]) -> bool:
        """Whether the prompt ends with the opening mark, white space aside: as chat templates open a section.

        A mark in somebody's text, or in an earlier turn, opens nothing.
        """
        tail = list(prompt_ids[-MAX_THINK_TAIL:])
        if think_ids[0] not in tail:
            return False
        behind = tail[len(tail) - tail[::-1].index(think_ids[0]) :]
        return not self._tokenizer.decode(behind, skip_special_tokens=False).strip()

    def _think_ids(self) -> tuple[int, int] | None:
        opening, closing = map(self._tokenizer.token_id, THINK_MARKS)
        if opening is None or closing is None or max(opening, closing) >= self._info.vocab_size:
            return None
        return opening, closing

    def _bad_words(self, words: Sequence[str]) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
        """Words of one token, and those of several; each as it is and behind a space."""
        single: list[int] = []
        several: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, f' {word}'):
                ids = tuple(self._tokenizer.encode(text, add_special=False))
                if max(ids, default=0) >= self._info.vocab_size:
                    raise RequestError('bad_words', word, 'has a token that this model cannot emit; leave it out')
                if len(ids) == 1:
                    single.append(ids[0])
                elif len(ids) > MAX_BAD_WORD_TOKENS:
                    raise RequestError(
                        'bad_words', word, f'each at most {MAX_BAD_WORD_TOKENS} tokens; it has {len(ids)}'
                    )
                elif ids:
                    several[ids] = None
        if len(several) > MAX_BAD_WORDS:
            remedy = f'at most {MAX_BAD_WORDS} that are several tokens long; a word counts again behind a space'
            raise RequestError('bad_words', f'{len(several)} sequences of tokens', remedy)
        return single, tuple(several)

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

    `max_new_tokens` None, or more than `session_len` leaves, becomes what it leaves; no other count is larger than the
    session either. With `ignore_eos` the EOS ids are
    banned, except those that the request names as its own stop ids.
    """
    check_prompt(info, prompt_ids)
    room = info.session_len - len(prompt_ids)
    max_new_tokens = room if config.max_new_tokens is None else min(config.max_new_tokens, room)
    own_stop_ids = tuple(config.stop_token_ids or ())
    bad_ids, allowed_ids = tuple(config.bad_token_ids or ()), tuple(config.allowed_token_ids or ())
    bias = tuple((config.logit_bias or {}).items())
    check_ids(info, 'stop_token_ids', own_stop_ids)
    check_ids(info, 'bad_token_ids', bad_ids)
    check_ids(info, 'allowed_token_ids', allowed_ids)
    check_ids(info, 'logit_bias', [token_id for token_id, _ in bias])
    stop_ids = tuple(dict.fromkeys(own_stop_ids if config.ignore_eos else (*eos_ids, *own_stop_ids)))
    if len(stop_ids) > MAX_STOP_IDS:
        remedy = f'at most {MAX_STOP_IDS} stop ids, the {len(eos_ids)} EOS ids of the model included'
        raise RequestError('stop_token_ids', f'{len(own_stop_ids)} ids', remedy)
    sampled = config.do_sample and config.temperature >= GREEDY_TEMPERATURE
    draft_sampling = (config.draft_sampling or info.draft_sampling) if sampled else 'greedy'
    check_draft_sampling(info, draft_sampling)
    budget = config.thinking_budget
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min(config.min_new_tokens or 0, max_new_tokens),
        temperature=config.temperature if sampled else 0.0,
        top_k=config.top_k if sampled and config.top_k < info.vocab_size else 0,
        top_p=config.top_p if sampled else 1.0,
        min_p=config.min_p if sampled else 0.0,
        seed=secrets.randbits(64) if config.random_seed is None else config.random_seed % NUM_SEEDS,
        stop_ids=stop_ids,
        banned_ids=(*(i for i in eos_ids if config.ignore_eos and i not in own_stop_ids), *bad_ids),
        logprobs=config.logprobs,
        max_drafts=_max_drafts(info, config),
        draft_sampling=draft_sampling,
        repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        logit_bias=bias,
        allowed_ids=allowed_ids,
        thinking_budget=None if budget is None else min(budget, info.session_len),
    )


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
