"""Errors as OpenAI's clients read them, {"error": {"message", "type", "param", "code"}}, and each one's HTTP status.

Next: answers.py, which sends them before or inside a stream.
"""

import difflib
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from specdec.errors import CapacityError, EngineError, RequestError, short
from specdec.messages import Response
from specdec.serve.text import dumps

TYPES = {
    401: 'authentication_error',
    403: 'permission_error',
    404: 'not_found_error',
    429: 'rate_limit_error',
    500: 'server_error',
    503: 'server_error',
}  # any other status: invalid_request_error


@dataclass(slots=True)
class ApiError(Exception):
    """An error with its HTTP status; `param` is the request's field at fault."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, 'invalid_request_error')
        return {'error': {'message': self.message, 'type': kind, 'param': self.param, 'code': self.code}}

    def encoded(self) -> bytes:
        return dumps(self.body).encode()


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error raised on purpose, or of one that should not have happened."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CapacityError):
        headers = {'Retry-After': str(max(1, round(error.retry_after)))}
        return ApiError(429, str(error), error.code, error.field, headers)
    if isinstance(error, RequestError):
        return ApiError(400, str(error), error.code, error.field)
    if isinstance(error, EngineError):
        return ApiError(503, str(error), 'engine_error')
    return ApiError(500, 'the server failed to answer; its log has the cause', 'internal_error')


def failed_response(response: Response) -> ApiError:
    """The error of a request that ended with finish_reason 'error'."""
    status = 500 if response.error_code == 'engine_error' else 400
    return ApiError(status, response.error_message or 'the request failed', response.error_code)


# what pydantic finds wrong, as what would be right; the rest is its own words
_FORMS = {
    'string_type': 'a string',
    'int_type': 'an integer',
    'int_from_float': 'an integer',
    'float_type': 'a number',
    'finite_number': 'a finite number',
    'bool_type': 'true or false',
    'list_type': 'a list',
    'dict_type': 'an object',
    'model_type': 'an object',
    'model_attributes_type': 'an object',
    'literal_error': 'one of {expected}',
    'too_short': 'a list of at least {min_length}',
    'too_long': 'a list of at most {max_length}',
    'string_too_long': 'a string of at most {max_length} characters',
    'greater_than_equal': 'at least {ge}',
    'less_than': 'below {lt}',
}


def invalid_body(error: ValidationError, kind: type[BaseModel], body: bytes) -> ApiError:
    """The first thing that is wrong with a body; unknown fields come first, for they name what was misspelt.

    Of several forms that a field may have, the one that the value came closest to says what is wrong.
    """
    found = error.errors(include_url=False)
    if found[0]['type'] == 'json_invalid':
        return ApiError(400, f'the body is no JSON: {found[0]["msg"]}', 'invalid_json')
    value = from_json(body)
    first = next((one for one in found if one['type'] == 'extra_forbidden'), found[0])
    same = [one for one in found if one['loc'][:1] == first['loc'][:1]]
    if first['type'] != 'extra_forbidden':
        first = max(same, key=lambda one: _distance(_path(one, value)))
    keys = _path(first, value)
    path = '.'.join(map(str, keys))
    param = str(keys[0]) if keys else None
    if first['type'] == 'extra_forbidden':
        close = difflib.get_close_matches(path, kind.model_fields, 1) if len(keys) == 1 else []
        remedy = f'unknown field; {f"is {close[0]} meant?" if close else "leave it out; /docs lists the fields"}'
        return ApiError(400, f'{path}={short(first["input"])}: {remedy}', 'unknown_field', path)
    if first['type'] == 'missing':
        about = kind.model_fields[path].description if path in kind.model_fields else None
        return ApiError(400, f'{path}: is missing; {about or "/docs says what it may be"}', 'missing_field', param)
    forms = dict.fromkeys(_form(one) for one in same if _path(one, value) == keys)
    message = f'{path or "the body"}={short(first["input"])}: must be {" or ".join(forms)}'
    return ApiError(400, message[:500], 'invalid_value', param)


def _path(found: Any, value: Any) -> list[int | str]:
    """Where the error is: pydantic puts the names of the forms that a value may have between keys and indices."""
    keys: list[int | str] = []
    for step in found['loc']:
        if (isinstance(value, dict) and step in value) or (isinstance(value, list) and isinstance(step, int)):
            value = value[step]
            keys.append(step)
    return [*keys, found['loc'][-1]] if found['type'] == 'missing' else keys


def _distance(path: list[int | str]) -> tuple[int, list[int]]:
    """How far into a value an error is: deeper, then later in lists."""
    return len(path), [key for key in path if isinstance(key, int)]


def _form(found: Any) -> str:
    form = _FORMS.get(found['type'])
    if form is not None:
        return form.format(**found.get('ctx', {}))
    return str(found['msg']).removeprefix('Input should be ')
