"""What one request may ask of one engine: every id, length and number of it, checked before anything of it is kept.

The device's tables have fixed widths and hold 64-bit integers; what does not fit them is refused here, one request at a
time, so that nothing can fail while a step is prepared for everybody. Next: engine.py, which checks what it is given.
"""

from collections.abc import Collection, Sequence
from typing import Any

from specdec.errors import RequestError
from specdec.messages import (
    DRAFT_SAMPLINGS,
    MAX_ALLOWED_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BANNED_IDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_IDS,
    EngineInfo,
    EngineRequest,
    SamplingParams,
    check_generation_number,
)

MAX_COUNT = 2**31 - 1  # of tokens: far beyond any session, and sums of a few still fit 64 bits


def check_request(info: EngineInfo, request: EngineRequest) -> None:
    """RequestError that names what this engine can never serve; `params` as they are, resolved or not."""
    _check_whole('request_id', request.request_id, -(2**63), 2**63 - 1)
    check_prompt(info, request.prompt_ids)
    params = request.params
    for field, value, low, high in (
        ('max_new_tokens', params.max_new_tokens, 1, MAX_COUNT),
        ('min_new_tokens', params.min_new_tokens, 0, MAX_COUNT),
        ('top_k', params.top_k, 0, MAX_COUNT),
        ('random_seed', params.seed, -(2**63), 2**64 - 1),
    ):
        _check_whole(field, value, low, high)
    for field, value, high in (
        ('logprobs', params.logprobs, MAX_LOGPROBS),
        ('num_speculative_tokens', params.max_drafts, MAX_COUNT),
        ('thinking_budget', params.thinking_budget, MAX_COUNT),
    ):
        if value is not None:
            _check_whole(field, value, 0, high)
    for field, number in (
        ('temperature', params.temperature),
        ('top_p', params.top_p),
        ('min_p', params.min_p),
        ('repetition_penalty', params.repetition_penalty),
        ('presence_penalty', params.presence_penalty),
        ('frequency_penalty', params.frequency_penalty),
    ):
        check_generation_number(field, number)
    for field, ids, limit in (
        ('stop_token_ids', params.stop_ids, MAX_STOP_IDS),
        ('bad_token_ids', params.banned_ids, MAX_BANNED_IDS),
        ('allowed_token_ids', params.allowed_ids, MAX_ALLOWED_IDS),
        ('logit_bias', [token_id for token_id, _ in params.logit_bias], MAX_LOGIT_BIAS),
    ):
        _check_count(field, ids, limit)
        check_ids(info, field, ids)
    for _, bias in params.logit_bias:
        check_generation_number('logit_bias', bias)
    _check_words(info, params.bad_words)
    _check_thinking(info, params)
    check_draft_sampling(info, params.draft_sampling)
    if params.grammar is not None and not isinstance(params.grammar, str):
        raise RequestError('response_format', params.grammar, 'must be a grammar in its serialised form')


def check_prompt(info: EngineInfo, prompt_ids: Sequence[int]) -> None:
    if not prompt_ids:
        raise RequestError('prompt', '', 'is empty; give at least one token', 'empty_prompt')
    if len(prompt_ids) >= info.session_len:
        remedy = f'must leave room for an answer in session_len={info.session_len}; shorten it'
        raise RequestError('prompt', f'{len(prompt_ids)} tokens', remedy, 'context_length_exceeded')
    check_ids(info, 'prompt', prompt_ids)


def check_ids(info: EngineInfo, field: str, token_ids: Sequence[int]) -> None:
    """All of them integers, and ids of this model; a prompt may have very many, so none is looked at alone."""
    if not token_ids:
        return
    if set(map(type, token_ids)) != {int}:
        wrong = next(i for i in token_ids if type(i) is not int)
        raise RequestError(field, wrong, 'token ids must be integers')
    if min(token_ids) < 0 or max(token_ids) >= info.vocab_size:
        wrong = next(i for i in token_ids if not 0 <= i < info.vocab_size)
        raise RequestError(field, wrong, f'token ids of this model lie in [0, {info.vocab_size})')


# the keys of a response_format beside 'type'; 'json_schema' has OpenAI's own, or is the schema itself (LMDeploy)
FORMAT_KEYS: dict[str, tuple[str, ...]] = {
    'text': (),
    'json_object': (),
    'json_schema': ('json_schema',),
    'regex': ('regex',),
    'regex_schema': ('regex_schema',),
    'ebnf': ('ebnf',),
    'choice': ('choice',),
    'structural_tag': ('format', 'structures', 'triggers'),
}
SCHEMA_KEYS = ('name', 'description', 'schema', 'strict')


def check_response_format(asked: dict[str, Any]) -> None:
    """RequestError for a key that has no meaning with this type; unknown types are the compiler's affair."""
    kind = asked.get('type')
    known = FORMAT_KEYS.get(kind) if isinstance(kind, str) else None
    if known is None:
        return
    for key in asked:
        if key not in (*known, 'type'):
            remedy = f"its type {kind!r} has no '{key}'; leave that out"
            if kind == 'json_object' and key in ('schema', 'json_schema'):
                remedy = "its type 'json_object' takes no schema; for one use type 'json_schema'"
            raise RequestError('response_format', asked, remedy)
    schema = asked.get('json_schema')
    if kind == 'json_schema' and isinstance(schema, dict) and 'schema' in schema:
        for key in schema:
            if key not in SCHEMA_KEYS:
                remedy = f"its json_schema has no '{key}', only " + ', '.join(map(repr, SCHEMA_KEYS))
                raise RequestError('response_format', asked, remedy)


def check_draft_sampling(info: EngineInfo, wanted: str) -> None:
    if wanted not in DRAFT_SAMPLINGS:
        raise RequestError('draft_sampling', wanted, 'must be one of ' + ', '.join(map(repr, DRAFT_SAMPLINGS)))
    if wanted == 'probabilistic' != info.draft_sampling and info.num_drafts > 0:
        remedy = "needs an engine that was started with draft_sampling='probabilistic', which keeps memory for it"
        raise RequestError('draft_sampling', wanted, remedy, 'unsupported_value')


def _check_words(info: EngineInfo, words: Sequence[tuple[int, ...]]) -> None:
    _check_count('bad_words', words, MAX_BAD_WORDS)
    for word in words:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            remedy = f'each must have 1 to {MAX_BAD_WORD_TOKENS} tokens'
            raise RequestError('bad_words', f'{len(word)} tokens', remedy)
        check_ids(info, 'bad_words', word)


def _check_thinking(info: EngineInfo, params: SamplingParams) -> None:
    if params.think_ids is None:
        if params.thinking_budget is not None:
            remedy = 'needs the ids of the tokens around a reasoning section (think_ids)'
            raise RequestError('thinking_budget', params.thinking_budget, remedy)
        return
    if len(params.think_ids) != 2:
        raise RequestError('think_ids', params.think_ids, 'must be two ids, of the opening and the closing token')
    check_ids(info, 'think_ids', params.think_ids)


def _check_count(field: str, values: Collection[object], limit: int) -> None:
    if len(values) > limit:
        raise RequestError(field, f'{len(values)} entries', f'at most {limit}')


def _check_whole(field: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise RequestError(field, value, f'must be an integer in [{low}, {high}]')
