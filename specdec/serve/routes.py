"""The endpoints: a body is checked, becomes requests of the engine, and an answer that sends itself.

Next: service.py for what they share, fields.py for what the fields do, answers.py for how answers leave.
"""

import dataclasses
import json
import logging
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response as HttpResponse

from specdec.engine.grammar import tools_format
from specdec.engine.live_request import LiveRequest
from specdec.errors import EngineError, RequestError
from specdec.messages import MAX_STOP_STRINGS, GenerationConfig
from specdec.serve.answers import EngineAnswer
from specdec.serve.chunks import Answer, ChatChoice, Choice, CompletionChoice, GenerateChoice, TokenMarks, Wishes
from specdec.serve.errors import ApiError
from specdec.serve.fields import generation_config, refuse_what_cannot_act
from specdec.serve.guard import read_body
from specdec.serve.metrics import Snapshot, exposition
from specdec.serve.openapi import body_of
from specdec.serve.parsers.tools import END as END_OF_CALL
from specdec.serve.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    EncodeRequest,
    GenerateRequest,
    Message,
    OpenAISampling,
    Sampling,
)
from specdec.serve.service import Service
from specdec.serve.text import dumps

CHUNK, CHAT = 'chat.completion.chunk', 'chat.completion'
COMPLETION = 'text_completion'
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's

router = APIRouter()
logger = logging.getLogger('specdec')


def json_response(value: Any, status: int = 200) -> HttpResponse:
    return HttpResponse(dumps(value), status, media_type='application/json')


def _service(request: Request) -> Service:
    return request.app.state.service


# ------------------------------------------------------------------------------------------------------------ chat
@router.post('/v1/chat/completions', openapi_extra=body_of(ChatRequest), tags=['generation'])
async def chat_completions(request: Request) -> HttpResponse:
    """Answers a conversation. With `stream`, server-sent events, one for each step of the engine."""
    body = await read_body(request, ChatRequest)
    service = _service(request)
    service.check_model(body.model)
    own = frozenset({'parallel_tool_calls'} if body.tools else ())
    refuse_what_cannot_act(body, own)
    tools = _tools(service, body)
    num_top = _chat_logprobs(body)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    forced = _forced_tools(service, body, tools)
    config = generation_config(body, service.defaults, max_new_tokens=limit, logprobs=num_top, **forced)
    if tools is not None and body.parallel_tool_calls is False:
        config = _ended_by_one_call(config)
    await service.engine.prepare(config)
    prompt, prompt_ids = await _chat_prompt(service, body, tools)
    answer = _answer('chatcmpl', service, body, num_top)

    def choice(live: LiveRequest, index: int) -> Choice:
        parsers = service.parsers
        parser, counter = parsers.parser(prompt, tools), parsers.token_counter(prompt)
        return ChatChoice(answer, live, index, parser, counter, _marks(service, config))

    return _start(service, body, answer, [prompt_ids], [config], choice, CHUNK if body.stream else CHAT)


async def _chat_prompt(
    service: Service, body: ChatRequest, tools: list[dict[str, Any]] | None
) -> tuple[str, list[int]]:
    """The rendered conversation and its token ids; the former is '' for a prompt that came as ids."""
    if not body.messages:
        if body.input_ids:
            for name in ('chat_template_kwargs', 'enable_thinking', 'reasoning_effort'):
                if (value := body.__dict__[name]) not in (None, {}):
                    raise RequestError(name, value, 'is for the chat template, which input_ids go without')
            return '', body.input_ids
        raise RequestError('messages', body.messages, 'give at least one message, or input_ids', 'empty_messages')
    if body.input_ids:
        raise RequestError('input_ids', '[...]', 'goes with no messages; give one of them')
    if isinstance(body.messages, str):
        messages: list[dict[str, Any]] = [{'role': 'user', 'content': body.messages}]
    else:
        _check_extra_fields(service, body.messages)
        messages = [_message(message.model_dump(exclude_none=True)) for message in body.messages]
    prompt = service.render(messages, tools, _template_arguments(service, body))
    return prompt, await service.encode(prompt, add_special=False)


def _check_extra_fields(service: Service, messages: list[Message]) -> None:
    """Fields of messages that this interface does not know must at least be known to the chat template."""
    for index, message in enumerate(messages):
        for name, value in (message.model_extra or {}).items():
            if value is not None and not service.engine.tokenizer.template_mentions(name):
                remedy = "unknown field, and the model's chat template does not read it; leave it out"
                raise RequestError(f'messages.{index}.{name}', value, remedy, 'unknown_field')


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """As templates expect it: no 'developer', and the arguments of tool calls as values rather than as JSON text."""
    if message['role'] == 'developer':
        message['role'] = 'system'
    for call in message.get('tool_calls') or ():
        function = call.get('function')
        if isinstance(function, dict) and isinstance(function.get('arguments'), str):
            try:
                arguments = json.loads(function['arguments'] or '{}')
            except (ValueError, RecursionError):
                continue
            if isinstance(arguments, dict):
                function['arguments'] = arguments
    return message


TEMPLATE_ARGUMENTS_OF_OURS = frozenset(
    ('messages', 'conversation', 'tools', 'chat_template', 'tokenize', 'add_generation_prompt', 'documents',
     'continue_final_message', 'padding', 'truncation', 'max_length', 'return_tensors', 'return_dict',
     'return_assistant_tokens_mask', 'tokenizer_kwargs')
)  # fmt: skip


def _template_arguments(service: Service, body: ChatRequest) -> dict[str, Any]:
    arguments = dict(body.chat_template_kwargs or {})
    taken = TEMPLATE_ARGUMENTS_OF_OURS & arguments.keys()
    if taken:
        name = min(taken)
        raise RequestError('chat_template_kwargs', name, 'is not for the request to set')
    reads = service.engine.tokenizer.template_reads
    for name in arguments:
        if not reads(name):
            remedy = f"the model's chat template does not read {name!r}; leave it out"
            raise RequestError('chat_template_kwargs', arguments, remedy, 'unsupported_value')
    for name in ('enable_thinking', 'reasoning_effort'):
        value = body.__dict__[name]
        if value is None:
            continue
        if not reads(name):
            remedy = "the model's chat template does not read it; leave it out"
            raise RequestError(name, value, remedy, 'unsupported_value')
        arguments[name] = value
    return arguments


def _tools(service: Service, body: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools that the template is shown; RequestError for what has no parser behind it."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, 'none', 'auto'):
            raise RequestError('tool_choice', choice, 'needs tools')
        return None
    for tool in body.tools:
        if tool.get('type') != 'function' or not isinstance(tool.get('function'), dict):
            raise RequestError('tools', tool, "each must be {'type': 'function', 'function': {...}}")
        if not isinstance(tool['function'].get('name'), str):
            raise RequestError('tools', tool, 'each function needs a name')
    if choice == 'none':
        return None
    if service.parsers.tools is None:
        raise RequestError('tools', '[...]', 'the server was started without --tool-call-parser', 'unsupported_value')
    return body.tools


def _forced_tools(service: Service, body: ChatRequest, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    """The grammar of answers that must call a tool, as settings; nothing where the model chooses."""
    choice = body.tool_choice
    if tools is None or choice in (None, 'auto'):
        return {}
    if body.response_format is not None and body.response_format != {'type': 'text'}:
        raise RequestError('tool_choice', choice, 'contradicts response_format; the answer is either')
    return {'response_format': tools_format(service.parsers.tools, tools, choice)}


def _ended_by_one_call(config: GenerationConfig) -> GenerationConfig:
    """The same, with the end of the first tool call as the end of the answer."""
    if config.min_new_tokens:
        remedy = 'contradicts parallel_tool_calls=false, with which an answer ends behind its first call'
        raise RequestError('min_new_tokens', config.min_new_tokens, remedy)
    stops = [*(config.stop_words or ()), END_OF_CALL]
    if len(stops) > MAX_STOP_STRINGS:
        remedy = f'at most {MAX_STOP_STRINGS - 1} with parallel_tool_calls=false, which needs one itself'
        raise RequestError('stop', f'{len(stops) - 1} strings', remedy)
    return dataclasses.replace(config, stop_words=stops)


def _chat_logprobs(body: ChatRequest) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise RequestError('top_logprobs', body.top_logprobs, 'needs logprobs=true')
        return None
    return body.top_logprobs or 0


# ----------------------------------------------------------------------------------------------------- completions
@router.post('/v1/completions', openapi_extra=body_of(CompletionRequest), tags=['generation'])
async def completions(request: Request) -> HttpResponse:
    """Continues text as it is, without a chat template. Several prompts give as many choices."""
    body = await read_body(request, CompletionRequest)
    service = _service(request)
    service.check_model(body.model)
    refuse_what_cannot_act(body)
    limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    config = generation_config(body, service.defaults, max_new_tokens=limit, logprobs=body.logprobs)
    await service.engine.prepare(config)
    prompts = [await _as_ids(service, prompt) for prompt in _prompts(body.prompt)]
    answer = _answer('cmpl', service, body, body.logprobs)

    def choice(live: LiveRequest, index: int) -> Choice:
        return CompletionChoice(answer, live, index, _marks(service, config))

    return _start(service, body, answer, prompts, [config] * len(prompts), choice, COMPLETION)


def _prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return prompt


async def _as_ids(service: Service, prompt: str | list[int]) -> list[int]:
    return prompt if isinstance(prompt, list) else await service.encode(prompt)


@router.post('/generate', openapi_extra=body_of(GenerateRequest), tags=['generation'])
async def generate(request: Request) -> HttpResponse:
    """LMDeploy's form: a prompt or token ids in, text and token ids out."""
    body = await read_body(request, GenerateRequest)
    service = _service(request)
    refuse_what_cannot_act(body, frozenset({'return_logprob'}))
    if (body.prompt is None) == (body.input_ids is None):
        raise RequestError('prompt', body.prompt, 'give either prompt or input_ids')
    if body.top_logprobs_num and not body.return_logprob:
        raise RequestError('top_logprobs_num', body.top_logprobs_num, 'needs return_logprob=true')
    num_top = (body.top_logprobs_num or 0) if body.return_logprob else None
    config = generation_config(body, service.defaults, max_new_tokens=body.max_tokens, logprobs=num_top)
    if config.n != 1:
        raise RequestError('n', config.n, 'this endpoint gives one answer')
    await service.engine.prepare(config)
    prompt_ids = await _as_ids(service, body.prompt if body.input_ids is None else body.input_ids)
    wishes = Wishes(num_top=num_top, speculation=bool(body.return_speculation))
    answer = Answer('gen', service.model_name, service.engine.tokenizer, wishes)

    def choice(live: LiveRequest, _index: int) -> Choice:
        return GenerateChoice(answer, live, _marks(service, config))

    return _start(service, body, answer, [prompt_ids], [config], choice, '')


def _answer(kind: str, service: Service, body: OpenAISampling, num_top: int | None) -> Answer:
    if body.stream_options is not None and not body.stream:
        raise RequestError('stream_options', '{...}', 'needs stream=true')
    wishes = Wishes(
        usage_chunk=bool(body.stream and body.stream_options and body.stream_options.include_usage),
        num_top=num_top,
        token_ids=bool(body.return_token_ids),
        speculation=bool(body.return_speculation),
    )
    return Answer(kind, service.model_name, service.engine.tokenizer, wishes)


def _marks(service: Service, config: GenerationConfig) -> TokenMarks:
    tokenizer = service.engine.tokenizer
    return TokenMarks(tokenizer.detokenizer(config.skip_special_tokens, config.spaces_between_special_tokens))


def _start(
    service: Service,
    body: Sampling,
    answer: Answer,
    prompts: list[list[int]],
    configs: list[GenerationConfig],
    choice: Callable[[LiveRequest, int], Choice],
    object_name: str,
) -> HttpResponse:
    """Takes the requests in, or says why not; the answer starts them when it is sent."""
    problem = service.problem()
    if problem is not None:
        raise EngineError(problem)
    if service.draining:
        raise ApiError(503, 'the server is shutting down', 'shutting_down')
    streams = bool(body.stream)
    choices_of = service.engine.make_choices
    lives = [live for ids, config in zip(prompts, configs) for live in choices_of(ids, config, streams)]
    service.admission.take(len(lives))
    try:
        service.register(answer.id, body.session_id, [live.request.request_id for live in lives])
    except BaseException:
        service.admission.give_back(len(lives))
        raise
    if logger.isEnabledFor(logging.INFO):
        _log(service, answer, prompts)
    choices = [choice(live, index) for index, live in enumerate(lives)]

    def on_end() -> None:
        service.forget(answer.id, body.session_id)

    return EngineAnswer(service.engine, service.admission, answer, choices, object_name, streams, on_end)


def _log(service: Service, answer: Answer, prompts: list[list[int]]) -> None:
    for ids in prompts:
        limit = service.config.max_log_len
        text = service.engine.tokenizer.decode(ids if limit is None else ids[: limit + 1], False)
        logger.info('%s: %d prompt tokens: %r', answer.id, len(ids), text if limit is None else text[:limit])


# ---------------------------------------------------------------------------------------------------- small things
@router.get('/v1/models', tags=['information'])
async def models(request: Request) -> HttpResponse:
    """The one model that is served."""
    return json_response({'object': 'list', 'data': [_card(_service(request))]})


@router.get('/v1/models/{name:path}', tags=['information'])
async def model(request: Request, name: str) -> HttpResponse:
    service = _service(request)
    service.check_model(name)
    return json_response(_card(service))


def _card(service: Service) -> dict[str, Any]:
    return {
        'id': service.model_name,
        'object': 'model',
        'created': service.created,
        'owned_by': 'specdec',
        'root': service.engine.info.model_name,
        'max_model_len': service.engine.info.session_len,
        'num_draft_tokens': service.engine.info.num_drafts,
    }


@router.get('/health', tags=['information'])
async def health(request: Request) -> HttpResponse:
    """200 while the engine is alive and answers, else 503 with the reason."""
    service = _service(request)
    problem = service.problem()
    if problem is None and service.draining:
        problem = 'the server is shutting down'
    if problem is not None:
        return json_response({'status': 'unhealthy', 'message': problem}, 503)
    return json_response({'status': 'healthy', 'message': 'the engine is running'})


@router.get('/metrics', tags=['information'])
async def metrics(request: Request) -> HttpResponse:
    """Counts and times, for Prometheus."""
    service = _service(request)
    if service.config.disable_metrics:
        raise ApiError(404, 'the server was started with --disable-metrics', 'not_found')
    stats = await service.stats()
    snapshot = Snapshot(
        service.model_name, service.engine.statistics, stats, service.admission.num_taken, service.settings
    )
    return HttpResponse(exposition(snapshot), media_type='text/plain; version=0.0.4')


@router.get('/step_cost', tags=['information'])
async def step_cost(request: Request) -> HttpResponse:
    """What the phases of a decode step cost, in milliseconds by batch size and rows: what verify lengths adapt to."""
    stats = await _service(request).stats()
    if stats is None or not stats.step_cost:
        raise ApiError(404, 'costs are kept with --verify-length adaptive only, while the engine runs', 'not_found')
    return HttpResponse(stats.step_cost, media_type='application/json')


@router.post('/v1/encode', openapi_extra=body_of(EncodeRequest), tags=['information'])
async def encode(request: Request) -> HttpResponse:
    """Text to token ids."""
    body = await read_body(request, EncodeRequest)
    service = _service(request)
    texts = [body.input] if isinstance(body.input, str) else body.input
    ids = []
    for text in texts:
        if body.do_preprocess:
            rendered = service.render([{'role': 'user', 'content': text}], None, {})
            ids.append(await service.encode(rendered, add_special=False))
        else:
            ids.append(await service.encode(text, body.add_bos is not False))
    if isinstance(body.input, str):
        return json_response({'input_ids': ids[0], 'length': len(ids[0])})
    return json_response({'input_ids': ids, 'length': [len(one) for one in ids]})


@router.post('/abort_request', openapi_extra=body_of(AbortRequest), tags=['generation'])
async def abort_request(request: Request) -> HttpResponse:
    """Ends requests with finish_reason 'abort': one answer's, one session's, or all."""
    body = await read_body(request, AbortRequest)
    service = _service(request)
    if not service.config.enable_abort_handling:
        raise ApiError(404, 'the server was started without --enable-abort-handling', 'not_enabled')
    if body.request_id is None and body.session_id is None and not body.abort_all:
        raise RequestError('session_id', None, 'give session_id, request_id or abort_all')
    return json_response({'num_aborted': service.abort(body.request_id, body.session_id, bool(body.abort_all))})
