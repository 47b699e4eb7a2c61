"""The OpenAPI document: bodies are read by hand (guard.py), so their schemas are put in here. Next: routes.py."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from specdec.serve.protocol import AbortRequest, ChatRequest, CompletionRequest, EncodeRequest, GenerateRequest

BODIES: tuple[type[BaseModel], ...] = (ChatRequest, CompletionRequest, GenerateRequest, EncodeRequest, AbortRequest)
REFERENCE = '#/components/schemas/{model}'
ERRORS = {
    '400': 'A value that cannot be served, or an unknown field.',
    '401': 'No valid API key.',
    '404': 'An unknown model or path.',
    '408': 'The body did not arrive in time.',
    '409': 'The session has a request under way.',
    '413': 'The body is too large.',
    '429': 'Too many requests under way; see Retry-After.',
    '500': 'The server failed.',
    '503': 'The engine is dead, or the server is shutting down.',
}


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads such a body."""
    schema = {'$ref': REFERENCE.format(model=kind.__name__)}
    return {'requestBody': {'required': True, 'content': {'application/json': {'schema': schema}}}}


def document(app: FastAPI) -> dict[str, Any]:
    """The whole document, made once."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, definitions = models_json_schema([(kind, 'validation') for kind in BODIES], ref_template=REFERENCE)
        components = made.setdefault('components', {})
        components['schemas'] = {'Error': _ERROR_SCHEMA} | definitions['$defs']
        components['securitySchemes'] = {'ApiKey': {'type': 'http', 'scheme': 'bearer'}}
        for path in made['paths'].values():
            for operation in path.values():
                _complete(operation)
        app.openapi_schema = made
    return app.openapi_schema


def _complete(operation: dict[str, Any]) -> None:
    """Every operation's errors, and streams where there are some; FastAPI's own 422 is never sent."""
    responses = operation['responses']
    responses.pop('422', None)
    error = {'application/json': {'schema': {'$ref': REFERENCE.format(model='Error')}}}
    for status, text in ERRORS.items():
        responses[status] = {'description': text, 'content': error}
    if 'generation' in operation.get('tags', ()):
        responses['200']['content'] = {'application/json': {}, 'text/event-stream': {}}


_ERROR_SCHEMA = {
    'type': 'object',
    'required': ['error'],
    'properties': {
        'error': {
            'type': 'object',
            'required': ['message', 'type', 'param', 'code'],
            'properties': {
                'message': {'type': 'string'},
                'type': {'type': 'string'},
                'param': {'type': ['string', 'null']},
                'code': {'type': ['string', 'null']},
            },
        }
    },
}
