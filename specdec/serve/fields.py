"""What each request field does: one table of those that act, one of those that are refused beyond their neutral value.

A field that the engine learns moves from NEUTRAL to ACTING, a line each. Fields in neither table have no effect on text
(`user`, `metadata`, ...) or belong to one endpoint.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from specdec.errors import RequestError
from specdec.messages import GenerationConfig
from specdec.models.configs import GenerationDefaults
from specdec.serve.protocol import Sampling


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _as_is(value: Any) -> Any:
    return value


def _by_token_id(value: dict[str, float]) -> dict[int, float]:
    """JSON has only text as keys."""
    try:
        return {int(token_id): bias for token_id, bias in value.items()}
    except ValueError:
        raise RequestError('logit_bias', value, 'each key must be a token id') from None


def _unless_text(value: dict[str, Any]) -> dict[str, Any] | None:
    return None if value == {'type': 'text'} else value


# request field: field of GenerationConfig (which checks values, and refuses what it cannot honour), conversion
ACTING: dict[str, tuple[str, Callable[[Any], Any]]] = {
    'temperature': ('temperature', _as_is),
    'top_p': ('top_p', _as_is),
    'top_k': ('top_k', _as_is),
    'min_p': ('min_p', _as_is),
    'n': ('n', _as_is),
    'seed': ('random_seed', _as_is),
    'stop': ('stop_words', _as_list),
    'stop_token_ids': ('stop_token_ids', _as_is),
    'ignore_eos': ('ignore_eos', _as_is),
    'min_new_tokens': ('min_new_tokens', _as_is),
    'skip_special_tokens': ('skip_special_tokens', _as_is),
    'spaces_between_special_tokens': ('spaces_between_special_tokens', _as_is),
    'include_stop_str_in_output': ('include_stop_str_in_output', _as_is),
    'repetition_penalty': ('repetition_penalty', _as_is),
    'repetition_ngram_size': ('repetition_ngram_size', _as_is),
    'repetition_ngram_threshold': ('repetition_ngram_threshold', _as_is),
    'presence_penalty': ('presence_penalty', _as_is),
    'frequency_penalty': ('frequency_penalty', _as_is),
    'logit_bias': ('logit_bias', _by_token_id),
    'bad_words': ('bad_words', _as_is),
    'bad_token_ids': ('bad_token_ids', _as_is),
    'allowed_token_ids': ('allowed_token_ids', _as_is),
    'response_format': ('response_format', _unless_text),
    'speculative': ('speculative', _as_is),
    'num_speculative_tokens': ('num_speculative_tokens', _as_is),
    'draft_sampling': ('draft_sampling', _as_is),
    'thinking_budget': ('thinking_budget', _as_is),
}

# request field: values besides null that change nothing; any other is refused by name
NEUTRAL: dict[str, tuple[Any, ...]] = {
    'return_logprob': (False,),
    'return_routed_experts': (False,),
    'image_data': ([],),
    'media_io_kwargs': ({},),
    'mm_processor_kwargs': ({},),
    'functions': ([],),
    'function_call': ('none', 'auto'),
    'modalities': (['text'],),
    'audio': (),
    'prediction': (),
    'moderation': (),
    'verbosity': ('medium',),
    'web_search_options': (),
    'parallel_tool_calls': (True,),
    'suffix': ('',),
    'echo': (False,),
    'best_of': (1,),
    'logprob_start_len': (-1,),
}

_NAMES = {target: name for name, (target, _) in ACTING.items()} | {'max_new_tokens': 'max_tokens'}


def refuse_what_cannot_act(body: Sampling, own: frozenset[str] = frozenset()) -> None:
    """RequestError for a field that is set to what nobody here can do. `own`: fields the endpoint itself serves."""
    for name in body.model_fields_set & NEUTRAL.keys() - own:
        value = _value(body, name)
        if value is not None and not any(value == neutral for neutral in NEUTRAL[name]):
            neutral = ' or '.join(map(repr, NEUTRAL[name])) or 'null'
            raise RequestError(name, value, f'not supported here; leave it out, or at {neutral}', 'unsupported_value')


def generation_config(body: Sampling, defaults: Mapping[str, Any], **more: Any) -> GenerationConfig:
    """The request's settings, then the checkpoint's, then LMDeploy's; `more`: settled by the endpoint.

    RequestError names the request's field.
    """
    settings = {'do_sample': True, **defaults, **more}
    for name in body.model_fields_set & ACTING.keys():
        value = _value(body, name)
        target, convert = ACTING[name]
        if value is not None and (converted := convert(value)) is not None:
            settings[target] = converted
    try:
        return GenerationConfig(**settings)
    except RequestError as error:
        raise RequestError(_NAMES.get(error.field, error.field), error.value, error.remedy, error.code) from None


def sampling_defaults(suggested: GenerationDefaults) -> tuple[dict[str, Any], list[str]]:
    """What a checkpoint's generation_config.json sets for every request, and why some of it cannot be honoured."""
    served: dict[str, Any] = {}
    refusals: list[str] = []
    for name, value in dataclasses.asdict(suggested).items():
        if name not in ('temperature', 'top_k', 'top_p', 'min_p', 'repetition_penalty') or value is None:
            continue
        try:
            GenerationConfig(**{name: value})
            served[name] = value
        except RequestError as error:
            refusals.append(str(error))
    return served, refusals


def _value(body: Sampling, name: str) -> Any:
    return body.__dict__[name]
