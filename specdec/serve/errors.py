"""Errors as OpenAI's clients read them, {"error": {"message", "type", "param", "code"}}, and each one's HTTP status.

Next: answers.py, which sends them before or inside a stream.
"""

from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from specdec.errors import CapacityError, EngineError, RequestError
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


def invalid_body(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body; unknown fields come first, for they name what was misspelt."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    first = next((one for one in found if one['type'] == 'extra_forbidden'), found[0])
    path = '.'.join(map(str, first['loc']))
    if first['type'] == 'json_invalid':
        return ApiError(400, f'the body is no JSON: {first["msg"]}', 'invalid_json')
    if first['type'] == 'extra_forbidden':
        return ApiError(400, f'{path}: unknown field', 'unknown_field', path)
    param = str(first['loc'][0]) if first['loc'] else None
    if first['type'] == 'missing':
        return ApiError(400, f'{path}: is missing', 'missing_field', param)
    return ApiError(400, f'{path or "the body"}: {first["msg"]}'[:500], 'invalid_value', param)
