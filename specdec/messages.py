"""The words exchanged with users and between server and engine: configs, requests, results. Standard library only.

Names and defaults follow LMDeploy; docs list the deliberate differences. A known field is accepted at LMDeploy's
default and refused by name at any value that cannot be honoured. Next: engine/async_engine.py, which turns a
prompt and a GenerationConfig into an EngineRequest.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from specdec.errors import ConfigError, RequestError

FinishReason = Literal['stop', 'length', 'abort', 'error']

METHODS = ('dflash', 'dspark')
DTYPES = ('auto', 'float32', 'bfloat16', 'float16')
GREEDY_TEMPERATURE = 1e-5  # sampling below this temperature is greedy (DeepSpec and vLLM draw the line here too)
MAX_STOP_IDS = 64  # stop token ids per request, model's EOS ids included: the width of a device table
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 32
MAX_STOP_STRING_LENGTH = 256
MAX_BANNED_IDS = 256  # ids that a request may never emit, EOS ids and bad words of one token included
MAX_ALLOWED_IDS = 16384
MAX_BAD_WORDS = 64  # device tables again: bad words of several tokens, and how many tokens each may have
MAX_BAD_WORD_TOKENS = 16
MAX_LOGIT_BIAS = 512
MAX_CHOICES = 128
MAX_NGRAM = 1024
VERIFY_LENGTHS = ('fixed', 'threshold', 'adaptive')
DRAFT_SAMPLINGS = ('greedy', 'coupled', 'probabilistic')
LOGPROBS_MODES = (None, 'raw_logprobs', 'processed_logprobs')


# ------------------------------------------------------------------------------------------------ engine settings
@dataclass(frozen=True, slots=True)
class PytorchEngineConfig:
    """How the engine runs. `tp`: ranks that share every layer, a process each (docs/distributed.md).

    Fields and order are LMDeploy's; what is marked "default only" is refused otherwise.
    """

    dtype: str = 'auto'
    tp: int = 1
    dp: int = 1
    dp_rank: int = 0  # default only
    ep: int = 1
    session_len: int | None = None
    max_batch_size: int | None = None
    attn_tp_size: int | None = None  # default only
    mlp_tp_size: int | None = None  # default only
    moe_tp_size: int | None = None  # default only
    cache_max_entry_count: float = 0.8
    prefill_interval: int = 16  # default only: chunks and decoding rows share every step here
    block_size: int = 64  # tokens per page
    kernel_block_size: int = -1  # default only: kernels use block_size
    num_cpu_blocks: int = 0  # default only
    num_gpu_blocks: int = 0  # number of pages, 0 = by cache_max_entry_count
    adapters: dict[str, str] | None = None  # default only
    max_prefill_token_num: int | None = None
    thread_safe: bool = False  # default only
    enable_prefix_caching: bool = True
    device_type: str = 'auto'
    eager_mode: bool = False
    custom_module_map: dict[str, str] | None = None  # default only
    download_dir: str | None = None
    revision: str | None = None
    quant_policy: int = 0  # default only
    distributed_executor_backend: str | None = None  # default only
    empty_init: bool = False  # default only
    enable_microbatch: bool = False  # default only
    enable_eplb: bool = False  # default only
    enable_mp_engine: bool = False  # default only: the server always spawns, the pipeline never does
    mp_engine_backend: str = 'mp'  # default only
    model_format: str | None = None  # default only
    enable_metrics: bool = True
    hf_overrides: dict[str, Any] | None = None  # default only
    language_model_only: bool = False  # default only
    logprobs_mode: str | None = None
    enable_return_routed_experts: bool = False  # default only
    enable_transfer_obj_ref: bool = False  # default only
    cudagraph_capture_batch_sizes: list[int] | None = None  # batch sizes that get CUDA graphs
    piecewise_cudagraph_max_tokens: int | None = None  # default only
    prefix_cache_state_budget: int = 0  # copies of what requests keep by slot, 0 = by a share of the memory
    prefix_cache_decode_state_interval: int = 0  # default only, as all that follow
    dllm_block_length: int | None = None
    dllm_unmasking_strategy: str = 'low_confidence_dynamic'
    dllm_denoising_steps: int | None = None
    dllm_confidence_threshold: float = 0.85
    role: str = 'Hybrid'
    migration_backend: str = 'DLSlime'
    kv_transfer_config: dict[str, Any] | None = None
    rank_timeout: float = 60.0  # ours: seconds that ranks wait for one of them before the engine ends

    def __post_init__(self) -> None:
        _choice('dtype', self.dtype, DTYPES)
        _choice('device_type', self.device_type, ('auto', 'cpu', 'cuda'))
        _choice('logprobs_mode', self.logprobs_mode, LOGPROBS_MODES)
        _at_least('tp', self.tp, 1)
        for name in ('dp', 'ep'):
            if getattr(self, name) != 1:
                raise ConfigError(name, getattr(self, name), 'ranks share every layer here (tp); use 1')
        _number('rank_timeout', self.rank_timeout)
        if not self.rank_timeout > 0:
            raise ConfigError('rank_timeout', self.rank_timeout, 'must be above 0 seconds')
        _at_least('block_size', self.block_size, 1)
        _at_least('num_gpu_blocks', self.num_gpu_blocks, 0)
        _at_least('prefix_cache_state_budget', self.prefix_cache_state_budget, 0)
        for name in ('session_len', 'max_batch_size', 'max_prefill_token_num'):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for size in self.cudagraph_capture_batch_sizes or ():
            _at_least('cudagraph_capture_batch_sizes', size, 1)
        _number('cache_max_entry_count', self.cache_max_entry_count)
        if not 0 < self.cache_max_entry_count < 1:
            raise ConfigError('cache_max_entry_count', self.cache_max_entry_count, 'a share of free memory in (0, 1)')
        _refuse_unless_default(self, _ENGINE_DEFAULT_ONLY)


_ENGINE_DEFAULT_ONLY = (
    'dp_rank', 'attn_tp_size', 'mlp_tp_size', 'moe_tp_size', 'prefill_interval', 'kernel_block_size', 'num_cpu_blocks',
    'adapters', 'thread_safe', 'custom_module_map', 'quant_policy', 'distributed_executor_backend', 'empty_init',
    'enable_microbatch', 'enable_eplb', 'enable_mp_engine', 'mp_engine_backend', 'model_format', 'hf_overrides',
    'language_model_only', 'enable_return_routed_experts', 'enable_transfer_obj_ref', 'piecewise_cudagraph_max_tokens',
    'prefix_cache_decode_state_interval', 'dllm_block_length', 'dllm_unmasking_strategy',
    'dllm_denoising_steps', 'dllm_confidence_threshold', 'role', 'migration_backend', 'kv_transfer_config',
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Which draft proposes and how much of it is verified.

    `model` is a draft checkpoint (folder or hub name); '' means the drafts bundled with the target.
    `num_speculative_tokens` is K, the drafted tokens verified per step; None = as trained.
    `dflash_block_size` is K + 1, the verified rows of a DFlash step. `draft_sampling`: how sampling requests draw their
    drafts (docs/exactness.md); 'probabilistic' needs memory for the drafts' distributions and must be chosen here.

    `verify_length` (docs/verify_lengths.md): 'fixed' verifies every draft; 'threshold' those before the first whose
    confidence is below `confidence_threshold`; 'adaptive' as many as pay at the current load.
    """

    method: str
    model: str = ''
    num_speculative_tokens: int | None = None
    dflash_block_size: int | None = None
    draft_sampling: str = 'coupled'
    verify_length: str = 'fixed'
    confidence_threshold: float | None = None

    def __post_init__(self) -> None:
        _choice('method', self.method, METHODS)
        _choice('draft_sampling', self.draft_sampling, DRAFT_SAMPLINGS)
        _choice('verify_length', self.verify_length, VERIFY_LENGTHS)
        self._check_threshold()
        if self.num_speculative_tokens is not None:
            _at_least('num_speculative_tokens', self.num_speculative_tokens, 1)
        if self.dflash_block_size is None:
            return
        if self.method != 'dflash':
            raise ConfigError(
                'dflash_block_size',
                self.dflash_block_size,
                "goes with method='dflash' only; set num_speculative_tokens",
            )
        _at_least('dflash_block_size', self.dflash_block_size, 2)
        if self.num_speculative_tokens not in (None, self.dflash_block_size - 1):
            raise ConfigError(
                'dflash_block_size',
                self.dflash_block_size,
                f'contradicts num_speculative_tokens={self.num_speculative_tokens}; set one of them (block = tokens+1)',
            )

    def _check_threshold(self) -> None:
        limit, wanted = self.confidence_threshold, self.verify_length == 'threshold'
        if limit is None and wanted:
            raise ConfigError('confidence_threshold', None, "verify_length='threshold' needs one in (0, 1)")
        if limit is None:
            return
        if not wanted:
            raise ConfigError('confidence_threshold', limit, "goes with verify_length='threshold' only")
        _number('confidence_threshold', limit)
        if not 0 < limit < 1:
            raise ConfigError('confidence_threshold', limit, 'must lie in (0, 1)')

    @property
    def requested_tokens(self) -> int | None:
        """K as asked for, or None for the checkpoint's own."""
        return self.num_speculative_tokens if self.dflash_block_size is None else self.dflash_block_size - 1


@dataclass(frozen=True, slots=True)
class ChatTemplateConfig:
    """A chat template that replaces the tokenizer's own: Jinja text, or the path of a Jinja file."""

    chat_template: str | None = None


# ---------------------------------------------------------------------------------------------- what a user asks
@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """What one request asks for. Fields and order are LMDeploy's, then ours.

    `speculative=False` turns drafting off for this request; `num_speculative_tokens` caps its verified drafts;
    `draft_sampling` None is the engine's. `thinking_budget`: tokens that a reasoning section may have.
    `response_format`: a grammar that the answer follows (engine/grammar.py lists the types). With `n` > 1 choice i has
    seed + i.
    """

    n: int = 1
    max_new_tokens: int | None = 512
    do_sample: bool = False
    top_p: float = 1.0
    top_k: int = 50
    min_p: float = 0.0
    temperature: float = 0.8
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    random_seed: int | None = None
    stop_words: list[str] | None = None
    bad_words: list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None
    logprob_start_len: int = -1  # default only
    response_format: dict[str, Any] | None = None
    logits_processors: list[Any] | None = None  # default only
    output_logits: str | None = None  # default only
    output_last_hidden_state: str | None = None  # default only
    include_stop_str_in_output: bool = False
    return_ppl: bool = False  # default only
    with_cache: bool = False  # default only
    preserve_cache: bool = False  # default only
    migration_request: Any = None  # default only
    return_routed_experts: bool = False  # default only
    repetition_ngram_size: int = 0
    repetition_ngram_threshold: int = 0
    speculative: bool = True
    num_speculative_tokens: int | None = None
    draft_sampling: str | None = None
    thinking_budget: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        _generation_ranges(self)
        _generation_rules(self)
        _refuse_unless_default(self, _GENERATION_DEFAULT_ONLY, RequestError)


_GENERATION_DEFAULT_ONLY = (
    'logprob_start_len', 'logits_processors', 'output_logits', 'output_last_hidden_state', 'return_ppl', 'with_cache',
    'preserve_cache', 'migration_request', 'return_routed_experts',
)  # fmt: skip


# numbers that reach the device as float32: a logit divided by less than 0.01 might leave its range
_RANGES = {
    'temperature': (0.0, 2.0),
    'top_p': (0.0, 1.0),
    'min_p': (0.0, 1.0),
    'repetition_penalty': (0.01, 10.0),
    'presence_penalty': (-2.0, 2.0),
    'frequency_penalty': (-2.0, 2.0),
    'logit_bias': (-100.0, 100.0),  # each value
}


def check_generation_number(name: str, value: Any) -> None:
    """RequestError unless the setting `name` may have this value."""
    _number(name, value, RequestError)
    low, high = _RANGES[name]
    if not low <= value <= high:
        raise RequestError(name, value, f'must lie in [{low:g}, {high:g}]')
    if name == 'top_p' and value == 0:
        raise RequestError(name, value, 'must be above 0; for greedy decoding set do_sample=False')


def _generation_ranges(c: GenerationConfig) -> None:
    if c.max_new_tokens is not None:
        _at_least('max_new_tokens', c.max_new_tokens, 1, RequestError)
    if c.min_new_tokens is not None:
        _at_least('min_new_tokens', c.min_new_tokens, 0, RequestError)
        if c.max_new_tokens is not None and c.min_new_tokens > c.max_new_tokens:
            raise RequestError('min_new_tokens', c.min_new_tokens, f'must not exceed max_new_tokens={c.max_new_tokens}')
    _at_least('n', c.n, 1, RequestError)
    if c.n > MAX_CHOICES:
        raise RequestError('n', c.n, f'at most {MAX_CHOICES}')
    for name in ('top_p', 'min_p', 'temperature', 'repetition_penalty', 'presence_penalty', 'frequency_penalty'):
        check_generation_number(name, getattr(c, name))
    _at_least('top_k', c.top_k, 0, RequestError)
    if c.random_seed is not None:
        _integer('random_seed', c.random_seed, RequestError)
    if c.logprobs is not None:
        _at_least('logprobs', c.logprobs, 0, RequestError)
        if c.logprobs > MAX_LOGPROBS:
            raise RequestError('logprobs', c.logprobs, f'at most {MAX_LOGPROBS}')
    if c.num_speculative_tokens is not None:
        _at_least('num_speculative_tokens', c.num_speculative_tokens, 0, RequestError)
    _strings('stop_words', c.stop_words, MAX_STOP_STRINGS)
    for name, limit in (
        ('stop_token_ids', MAX_STOP_IDS), ('bad_token_ids', MAX_BANNED_IDS), ('allowed_token_ids', MAX_ALLOWED_IDS),
    ):  # fmt: skip
        _token_ids(name, getattr(c, name), limit)
    for name in (
        'do_sample',
        'ignore_eos',
        'skip_special_tokens',
        'spaces_between_special_tokens',
        'include_stop_str_in_output',
        'speculative',
    ):
        if not isinstance(getattr(c, name), bool):
            raise RequestError(name, getattr(c, name), 'must be True or False')


def _generation_rules(c: GenerationConfig) -> None:
    """Fields that rule tokens in or out, or end the text, each within its limits."""
    _strings('bad_words', c.bad_words, MAX_BAD_WORDS)
    if c.allowed_token_ids is not None and not c.allowed_token_ids:
        raise RequestError('allowed_token_ids', c.allowed_token_ids, 'allows no token; leave it out, or name some')
    if c.draft_sampling is not None and c.draft_sampling not in DRAFT_SAMPLINGS:
        remedy = 'must be one of ' + ', '.join(map(repr, DRAFT_SAMPLINGS))
        raise RequestError('draft_sampling', c.draft_sampling, remedy)
    if c.thinking_budget is not None:
        _at_least('thinking_budget', c.thinking_budget, 0, RequestError)
    for name in ('repetition_ngram_size', 'repetition_ngram_threshold'):
        _at_least(name, getattr(c, name), 0, RequestError)
    if c.repetition_ngram_size > 0 == c.repetition_ngram_threshold:
        raise RequestError('repetition_ngram_size', c.repetition_ngram_size, 'needs repetition_ngram_threshold')
    if c.repetition_ngram_threshold > 0 == c.repetition_ngram_size:
        raise RequestError('repetition_ngram_threshold', c.repetition_ngram_threshold, 'needs repetition_ngram_size')
    if c.repetition_ngram_size > MAX_NGRAM:
        raise RequestError('repetition_ngram_size', c.repetition_ngram_size, f'at most {MAX_NGRAM} tokens')
    _logit_bias(c.logit_bias)
    if c.response_format is not None and not isinstance(c.response_format, dict):
        raise RequestError('response_format', c.response_format, "must be a dictionary with a 'type'")


def _logit_bias(bias: dict[int, float] | None) -> None:
    if bias is None:
        return
    if not isinstance(bias, dict):
        raise RequestError('logit_bias', bias, 'must be a dictionary: token id to number')
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError('logit_bias', f'{len(bias)} entries', f'at most {MAX_LOGIT_BIAS}')
    for token_id, value in bias.items():
        _integer('logit_bias', token_id, RequestError)
        check_generation_number('logit_bias', value)


def _token_ids(name: str, ids: list[int] | None, limit: int) -> None:
    if ids is None:
        return
    if not isinstance(ids, (list, tuple)) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise RequestError(name, ids, 'must be a list of token ids')
    if len(set(ids)) > limit:
        raise RequestError(name, f'{len(set(ids))} ids', f'at most {limit}')


def _strings(name: str, words: list[str] | None, limit: int) -> None:
    if words is None:
        return
    if isinstance(words, str) or not isinstance(words, (list, tuple)):
        raise RequestError(name, words, 'must be a list of strings')
    if len(words) > limit:
        raise RequestError(name, f'{len(words)} strings', f'at most {limit}')
    for word in words:
        if not isinstance(word, str) or not word:
            raise RequestError(name, word, 'each must be a non-empty string')
        if len(word) > MAX_STOP_STRING_LENGTH:
            raise RequestError(name, word, f'each at most {MAX_STOP_STRING_LENGTH} characters')


# ------------------------------------------------------------------------------------------------- what comes back
@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Figures of one request's decode steps: steps, drafted (rows verified beyond the first), accepted.

    emitted tokens = prefill firsts + steps + accepted; the mean accepted length includes the bonus token.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def mean_accepted_length(self) -> float:
        return 1 + self.accepted / self.steps if self.steps else 0.0

    def __add__(self, other: 'SpeculationStats') -> 'SpeculationStats':
        return SpeculationStats(self.steps + other.steps, self.drafted + other.drafted, self.accepted + other.accepted)


@dataclass(slots=True)
class Response:
    """A piece of output (streaming) or the whole of it. The stop token is counted in neither text nor token_ids.

    `index`: which prompt it answers; `choice`: which of its n answers.
    """

    text: str = ''
    generate_token_len: int = 0
    input_token_len: int = 0
    finish_reason: FinishReason | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    logits: None = None
    last_hidden_state: None = None
    index: int = 0
    routed_experts: None = None
    cached_tokens: int = 0
    error_code: str | None = None
    error_message: str | None = None
    seed: int | None = None
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    choice: int = 0

    def extend(self, other: 'Response') -> 'Response':
        """Fold the next streamed piece into this one; scalar fields come from the newer piece."""
        self.text += other.text
        self.token_ids = self.token_ids + other.token_ids
        if other.logprobs:
            self.logprobs = (self.logprobs or []) + other.logprobs
        self.cached_tokens = self.cached_tokens or other.cached_tokens
        for name in (
            'generate_token_len',
            'input_token_len',
            'finish_reason',
            'index',
            'choice',
            'error_code',
            'error_message',
            'seed',
            'speculation',
        ):
            setattr(self, name, getattr(other, name))
        return self


# ----------------------------------------------------------------------------------------- server <-> engine words
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """A request's settings, resolved and checked: what the engine needs and nothing else.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 filter nothing. `max_drafts` None is the engine's K;
    0 turns drafting off. `stop_ids` end the request (after min_new_tokens); `banned_ids` are never emitted, nor is the
    last token of a `bad_words` entry behind the others; `allowed_ids`, if any, are all there is. `logprobs` None gives
    none, k the emitted token's and the k best. `think_ids`: tokens that open and close a reasoning section;
    `reasoning_open`: the prompt ends inside of one; `thinking_budget`: tokens that one may have. `grammar`:
    compiled, in xgrammar's serialised form.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    max_drafts: int | None = None
    draft_sampling: str = 'greedy'
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_ids: tuple[int, ...] = ()
    think_ids: tuple[int, int] | None = None
    thinking_budget: int | None = None
    grammar: str | None = None
    reasoning_open: bool = False

    @property
    def device_min_tokens(self) -> int:
        """With a grammar the minimum is the guide's affair, since it gives way where only an end is allowed."""
        return self.min_new_tokens if self.grammar is None else 0


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """`after`: a request whose prompt this one shares; it is admitted once that prompt has been computed, or left."""

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    after: int | None = None


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """What the engine must know of the tokenizer before the first request with a grammar, as xgrammar serialises it."""

    data: str


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the other side of the engine has to know of it; sent once, when the engine is ready.

    `folder` is the target's local folder (tokenizer and chat template lie there); `num_drafts` is K, 0 without a draft;
    `eos_ids` are those of the checkpoint's generation_config and config; `draft_sampling` is what requests get by
    default; `verify_length` how many of them are verified.
    """

    model_name: str
    folder: str
    vocab_size: int
    session_len: int
    max_batch_size: int
    num_drafts: int = 0
    eos_ids: tuple[int, ...] = ()
    device: str = 'cpu'
    dtype: str = 'float32'
    draft_sampling: str = 'greedy'
    verify_length: str = 'fixed'


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The first word of an engine in another process. `memory`: one line that says how memory was shared out."""

    info: EngineInfo
    memory: str


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """The last word of an engine in another process: it could not start, or it died.

    `kind` is 'config' or 'checkpoint' for an error that names a `field` and its `value`, else 'engine'.
    """

    kind: str
    message: str
    field: str = ''
    value: Any = None


@dataclass(frozen=True, slots=True)
class StatsQuery:
    """Asks for EngineStats; answered between two steps, in the order of the questions."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at this moment, and totals since its start. `num_pages` leaves the scratch page out.

    `num_pages_held` belong to requests; pages that only the prefix cache keeps count as free. `draft_budget`: drafted
    rows that the latest step may have had, None for all there were; `drafting`: it drafted blocks for the next one;
    `step_cost`: JSON table of what steps cost, '' unless verify lengths adapt.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_free_slots: int = 0
    num_pages: int = 0
    num_pages_held: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    draft_budget: int | None = None
    drafting: bool = False
    step_cost: str = ''


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """Stop these requests as soon as possible; ids that are unknown or finished are no error."""

    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as it crosses a process: a short machine-readable code and one line for a person."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step gave one request.

    `token_ids` include a stop token that ended it; they may be empty where no token was allowed (finish_reason
    'error'). `decode` is False for the token sampled by the last prompt chunk;
    then `drafted` is 0. `logprobs[i]` maps token ids to log-probabilities, the emitted token's first.
    """

    request_id: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    decode: bool = False
    drafted: int = 0
    cached_tokens: int = 0
    logprobs: tuple[dict[int, float], ...] | None = None
    error: ErrorInfo | None = None


# ------------------------------------------------------------------------------------------------------- checking
def _choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ConfigError(name, value, 'must be one of ' + ', '.join(map(repr, choices)))


def _integer(name: str, value: Any, error: type = ConfigError) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise error(name, value, 'must be an integer')


def _number(name: str, value: Any, error: type = ConfigError) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # an integer is finite, and may be too large for isfinite
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise error(name, value, 'must be a finite number')


def _at_least(name: str, value: Any, low: int, error: type = ConfigError) -> None:
    _integer(name, value, error)
    if value < low:
        raise error(name, value, f'must be at least {low}')


def _refuse_unless_default(config: Any, names: tuple[str, ...], error: type = ConfigError) -> None:
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    for name in names:
        if (value := getattr(config, name)) != defaults[name]:
            raise error(name, value, f'not supported here; leave it at {defaults[name]!r}')
