"""What crosses the wire, with httpx and raw sockets: errors, streams, disconnects, limits, keys."""

import concurrent.futures
import contextlib
import json
import re
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest

from tests.helpers.servers import ServerProcess, disconnecting_stream
from tests.serve.conftest import KEY

TEXT = 'The quick brown fox; 你好,世界。안녕하세요 naïve 😀👩‍👩‍👧 jumps over the lazy dog. ' * 3
CHAT, COMPLETIONS = '/v1/chat/completions', '/v1/completions'
AUTHORISED = {'Authorization': f'Bearer {KEY}'}


def post(server: ServerProcess, path: str, body: object, **headers: str) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=headers, timeout=60)


def events(response: httpx.Response) -> list[dict]:
    """The values of a stream, which must be well formed to the last byte."""
    assert response.headers['content-type'].startswith('text/event-stream')
    parts = response.text.split('\n\n')
    assert parts[-2:] == ['data: [DONE]', '']
    assert all(part.startswith('data: ') and '\n' not in part for part in parts[:-1])
    return [json.loads(part.removeprefix('data: ')) for part in parts[:-2]]


def unchunked(raw: bytes) -> bytes:
    parts = []
    while raw:
        size, _, rest = raw.partition(b'\r\n')
        parts.append(rest[: int(size, 16)])
        raw = rest[int(size, 16) + 2 :]
    return b''.join(parts)


def completion(prompt: object = TEXT, **more: object) -> dict:
    return {'model': 'echo', 'prompt': prompt, 'max_tokens': 2000, **more}


def chat(content: str = TEXT, **more: object) -> dict:
    return {'model': 'echo', 'messages': [{'role': 'user', 'content': content}], **more}


def error_of(response: httpx.Response) -> dict:
    assert set(response.json()) == {'error'}
    assert set(response.json()['error']) == {'message', 'type', 'param', 'code'}
    return response.json()['error']


# ------------------------------------------------------------------------------------------------------- streams
@pytest.mark.parametrize('drafts', range(8))
def test_stream_is_the_text_and_never_half_a_character(echo_server, drafts):
    whole = post(echo_server, COMPLETIONS, completion(num_speculative_tokens=drafts)).json()
    assert whole['choices'][0]['text'] == TEXT
    pieces = [
        event['choices'][0]['text']
        for event in events(post(echo_server, COMPLETIONS, completion(num_speculative_tokens=drafts, stream=True)))
    ]
    assert ''.join(pieces) == TEXT
    assert not any('\ufffd' in piece for piece in pieces)


@pytest.mark.parametrize('drafts', [0, 1, 3, 7])
def test_no_piece_of_a_stop_string_is_shown(echo_server, drafts):
    body = completion(num_speculative_tokens=drafts, stop=['世界。안녕', 'lazy dog'], return_speculation=True)
    found = events(post(echo_server, COMPLETIONS, body | {'stream': True}))
    expected = TEXT[: TEXT.index('世界')]
    texts = [event['choices'][0]['text'] for event in found]
    assert ''.join(texts) == expected
    marks = ''.join(text for event in found for text, _ in event['speculation']['tokens'])
    assert marks == expected
    for shown in (''.join(texts[: n + 1]) for n in range(len(texts))):
        assert expected.startswith(shown)


def test_speculation_per_chunk_and_only_on_demand(echo_server):
    found = events(post(echo_server, CHAT, chat('one two three four five six seven', stream=True)))
    assert all('speculation' not in event for event in found)
    body = chat('one two three four five six seven', stream=True, return_speculation=True)
    found = events(post(echo_server, CHAT, body))
    for event in found:
        speculation = event['speculation']
        assert speculation['drafted'] == sum(drafted for drafted, _ in speculation['steps'])
        assert speculation['accepted'] == sum(flag for _, flag in speculation['tokens'])
    total = post(echo_server, CHAT, body | {'stream': False}).json()['speculation']
    assert total['accepted'] == sum(event['speculation']['accepted'] for event in found)
    assert total['steps'] == sum(len(event['speculation']['steps']) for event in found)


def test_raw_sse_bytes(echo_server):
    address = urlsplit(echo_server.url)
    body = json.dumps(chat('hello\nworld', stream=True)).encode()
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = f'POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n'
        connection.sendall(head.encode() + b'Connection: close\r\n\r\n' + body)
        raw = b''
        while part := connection.recv(65536):
            raw += part
    header, _, rest = raw.partition(b'\r\n\r\n')
    assert header.startswith(b'HTTP/1.1 200 OK')
    assert b'content-type: text/event-stream' in header
    assert b'transfer-encoding: chunked' in header
    assert rest.endswith(b'data: [DONE]\n\n\r\n0\r\n\r\n')
    events = [json.loads(event) for event in re.findall(rb'data: (\{.*?\})\n\n', rest)]
    text = ''.join(event['choices'][0]['delta'].get('content', '') for event in events)
    assert text.startswith('hello\nworld')
    assert rest.isascii()


def test_stream_of_a_client_that_reads_slowly(echo_server):
    """What waits is merged, nothing is lost, and others go on meanwhile."""
    text = TEXT * 60
    address = urlsplit(echo_server.url)
    body = json.dumps(completion(text, stream=True, max_tokens=50_000)).encode()
    head = f'POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n'
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((address.hostname, address.port))
        connection.sendall(f'{head}Content-Length: {len(body)}\r\n\r\n'.encode() + body)
        time.sleep(1)
        assert post(echo_server, COMPLETIONS, completion('quick')).json()['choices'][0]['text'] == 'quick'
        raw = b''
        while part := connection.recv(65536):
            raw += part
    payload = unchunked(raw.partition(b'\r\n\r\n')[2]).decode()
    values = [json.loads(part[6:]) for part in payload.split('\n\n') if part.startswith('data: {')]
    assert ''.join(value['choices'][0]['text'] for value in values) == text


# ----------------------------------------------------------------------------------------------------- disconnects
@pytest.mark.parametrize('path', [CHAT, COMPLETIONS, '/generate'])
def test_disconnect_frees_the_request(echo_server, path):
    body = {CHAT: chat('!endless', stream=True), COMPLETIONS: completion('!endless', stream=True, max_tokens=50_000)}
    wanted = body.get(path, {'prompt': '!endless', 'stream': True, 'max_tokens': 50_000})
    before = echo_server.metrics()['request_success_total{finished_reason="abort"}']
    with disconnecting_stream(echo_server.url + path, wanted) as lines:
        next(lines)
        assert echo_server.metrics()['num_requests_running'] == 1
    echo_server.wait_until_idle()
    assert echo_server.metrics()['request_success_total{finished_reason="abort"}'] == before + 1


def test_disconnect_without_a_stream(echo_server):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(echo_server.url + CHAT, json=chat('!endless'), timeout=0.5)
    echo_server.wait_until_idle()


def test_disconnect_before_the_body_has_arrived(echo_server):
    address = urlsplit(echo_server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n')
        connection.sendall(b'Content-Length: 100\r\n\r\n{"prompt"')
    assert httpx.get(echo_server.url + '/health').status_code == 200


# ----------------------------------------------------------------------------------------------------------- abort
def test_abort_request(echo_server):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = [pool.submit(post, echo_server, CHAT, chat('!endless', session_id=i)) for i in (5, 6)]
        echo_server.wait_for(lambda: echo_server.metrics()['num_requests_running'] == 2)
        busy = post(echo_server, CHAT, chat('x', session_id=5))
        assert (busy.status_code, error_of(busy)['code']) == (409, 'session_busy')
        assert post(echo_server, '/abort_request', {'session_id': 7}).json() == {'num_aborted': 0}
        assert post(echo_server, '/abort_request', {'session_id': 5}).json() == {'num_aborted': 1}
        assert running[0].result().json()['choices'][0]['finish_reason'] == 'abort'
        assert not running[1].done()
        assert post(echo_server, '/abort_request', {'abort_all': True}).json() == {'num_aborted': 1}
        assert running[1].result().json()['choices'][0]['finish_reason'] == 'abort'
    assert post(echo_server, CHAT, chat('x', session_id=5)).status_code == 200
    assert post(echo_server, '/abort_request', {}).status_code == 400


def test_abort_by_the_answers_id_ends_a_stream_properly(echo_server):
    with disconnecting_stream(echo_server.url + CHAT, chat('!endless', stream=True)) as lines:
        identity = json.loads(next(lines).removeprefix('data: '))['id']
        assert post(echo_server, '/abort_request', {'request_id': identity}).json() == {'num_aborted': 1}
        rest = [line for line in lines if line]
    assert rest[-1] == 'data: [DONE]'
    assert json.loads(rest[-2].removeprefix('data: '))['choices'][0]['finish_reason'] == 'abort'


def test_abort_needs_its_flag(guarded_server):
    response = post(guarded_server, '/abort_request', {'abort_all': True}, **AUTHORISED)
    assert (response.status_code, error_of(response)['code']) == (404, 'not_enabled')


# ------------------------------------------------------------------------------------------- parsers, over the wire
TOOLS = [
    {'type': 'function', 'function': {'name': 'find', 'parameters': {'type': 'object', 'properties': {'what': {}}}}}
]
FIRST_CALL = {'what': 'a "fox"', 'far': {'km': [1, 2]}}
ANSWER = (
    '<think>\nWhere is it?\n</think>\n\nI shall look.\n'
    '<tool_call>\n{"name": "find", "arguments": {"what": "a \\"fox\\"", '
    '"far": {"km": [1, 2]}}}\n</tool_call>\n<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
)


@pytest.mark.parametrize('drafts', range(8))
def test_reasoning_and_tool_calls(echo_server, drafts):
    body = chat(ANSWER, tools=TOOLS, num_speculative_tokens=drafts)
    whole = post(echo_server, CHAT, body).json()
    choice, usage = whole['choices'][0], whole['usage']
    message = choice['message']
    assert (message['reasoning_content'], message['content']) == ('Where is it?', 'I shall look.')
    calls = [call['function'] for call in message['tool_calls']]
    assert [call['name'] for call in calls] == ['find', 'find']
    assert [json.loads(call['arguments']) for call in calls] == [{'what': 'a "fox"', 'far': {'km': [1, 2]}}, {}]
    assert len({call['id'] for call in message['tool_calls']}) == 2
    reasoning_tokens = usage['completion_tokens_details']['reasoning_tokens']
    assert 0 < reasoning_tokens < usage['completion_tokens']

    found = events(post(echo_server, CHAT, body | {'stream': True, 'stream_options': {'include_usage': True}}))
    assert found[-1]['usage'] == usage
    deltas = [event['choices'][0]['delta'] for event in found[:-1]]
    assert ''.join(delta.get('reasoning_content', '') for delta in deltas) == 'Where is it?'
    assert ''.join(delta.get('content', '') for delta in deltas) == 'I shall look.'
    streamed: dict[int, dict] = {}
    for news in (call for delta in deltas for call in delta.get('tool_calls', ())):
        if 'id' in news:
            assert news['index'] == len(streamed)
            streamed[news['index']] = {'name': news['function']['name'], 'arguments': ''}
        streamed[news['index']]['arguments'] += news['function']['arguments']
    assert list(streamed.values()) == calls


@pytest.mark.parametrize('stream', [False, True])
def test_one_call_where_they_may_not_be_parallel(echo_server, stream):
    body = chat(ANSWER, tools=TOOLS, stream=stream, stop=['never'])
    numbers = []
    for parallel in (True, False):
        response = post(echo_server, CHAT, body | {'parallel_tool_calls': parallel})
        choices = [event['choices'][0] for event in events(response)] if stream else response.json()['choices']
        parts = [choice['delta'] if stream else choice['message'] for choice in choices]
        news = [call for part in parts for call in part.get('tool_calls', ())]
        numbers.append(sum('name' in call['function'] for call in news))
    assert choices[-1]['finish_reason'] == 'tool_calls'
    assert json.loads(''.join(call['function']['arguments'] for call in news)) == FIRST_CALL
    assert numbers == [2, 1]
    response = post(echo_server, CHAT, body | {'parallel_tool_calls': False, 'min_new_tokens': 3})
    assert (response.status_code, error_of(response)['param']) == (400, 'min_new_tokens')


def test_tools_need_a_parser_and_a_choice_that_can_be_served(echo_server, guarded_server):
    response = post(guarded_server, CHAT, chat(tools=TOOLS), **AUTHORISED)
    assert (response.status_code, error_of(response)['param']) == (400, 'tools')
    assert post(guarded_server, CHAT, chat(tools=TOOLS, tool_choice='none'), **AUTHORISED).status_code == 200
    for choice in ('sometimes', {'type': 'function', 'function': {'name': 'nobody'}}):
        response = post(echo_server, CHAT, chat(tools=TOOLS, tool_choice=choice))
        assert (response.status_code, error_of(response)['param']) == (400, 'tool_choice')
    whole = post(echo_server, CHAT, chat(ANSWER, tools=TOOLS, tool_choice='none')).json()['choices'][0]['message']
    assert whole['tool_calls'] is None
    assert '<tool_call>' in whole['content']


# --------------------------------------------------------------------------------------------- LMDeploy's endpoints
def test_generate(echo_server):
    ids = post(echo_server, '/v1/encode', {'input': TEXT}).json()['input_ids']
    for prompt in ({'prompt': TEXT}, {'input_ids': ids}):
        answer = post(echo_server, '/generate', {**prompt, 'max_tokens': 5, 'return_logprob': True}).json()
        assert answer['output_ids'] == ids[:5]
        assert answer['meta_info']['finish_reason'] == {'type': 'length'}
        assert answer['meta_info']['prompt_tokens'] == len(ids)
        assert [i for _, i in answer['meta_info']['output_token_logprobs']] == ids[:5]
    found = events(post(echo_server, '/generate', {'prompt': TEXT, 'max_tokens': 500, 'stream': True}))
    assert ''.join(event['text'] for event in found) == TEXT
    assert [i for event in found for i in event['output_ids']] == ids
    assert post(echo_server, '/generate', {}).status_code == 400
    assert post(echo_server, '/generate', {'prompt': 'x', 'input_ids': [1]}).status_code == 400


def test_encode(echo_server):
    several = post(echo_server, '/v1/encode', {'input': ['a', 'the quick']}).json()
    assert several['length'] == [len(ids) for ids in several['input_ids']]
    assert post(echo_server, '/v1/encode', {'input': 'the', 'do_preprocess': True}).json()['length'] >= 1


def test_chat_takes_token_ids_and_parts(echo_server):
    ids = post(echo_server, '/v1/encode', {'input': 'the quick'}).json()['input_ids']
    answer = post(echo_server, CHAT, {'model': 'echo', 'input_ids': ids, 'return_token_ids': True}).json()
    assert answer['choices'][0]['message']['content'] == 'the quick'
    assert answer['choices'][0]['output_ids'] == ids
    parts = [{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}]
    message = {'role': 'user', 'content': parts}
    answer = post(echo_server, CHAT, {'model': 'echo', 'messages': [message]}).json()
    assert answer['choices'][0]['message']['content'] == 'ab'
    image = {'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'http://x/y.png'}}]}
    response = post(echo_server, CHAT, {'model': 'echo', 'messages': [image]})
    assert (response.status_code, error_of(response)['param']) == (400, 'messages')


# ---------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ('content', 'code'),
    [
        (b'', 'invalid_json'),
        (b'{', 'invalid_json'),
        (b'\xff\xfe', 'invalid_json'),
        (b'[' * 100_000, 'invalid_json'),
        (b'{"a":' * 50_000 + b'1' + b'}' * 50_000, 'invalid_json'),
        (b'"text"', 'invalid_value'),
        (b'null', 'invalid_value'),
        (b'{"model": "echo", "prompt": "x", "temperature": NaN}', None),
        (b'{"model": "echo", "prompt": "x", "temperature": 1e999}', None),
        (b'{"model": "echo", "prompt": "x", "seed": 1' + b'0' * 5000 + b'}', None),
        (b'{"model": "echo", "prompt": "\\ud800"}', None),
        (b'{"model": "echo", "prompt": ["x", 1]}', 'invalid_value'),
        (b'{"model": "echo", "prompt": []}', 'invalid_value'),
        (b'{"model": "echo", "prompt": [99999]}', 'invalid_value'),
        (b'{"model": "echo", "prompt": [-1]}', 'invalid_value'),
        (b'{"model": "echo", "prompt": ""}', 'empty_prompt'),
        (b'{"model": "echo"}', 'missing_field'),
        (b'{"model": "echo", "prompt": "x", "stop": ["' + b'x' * 300 + b'"]}', 'invalid_value'),
        (b'{"model": "echo", "prompt": "x", "logprobs": 21}', 'invalid_value'),
        (b'{"model": "echo", "prompt": "x", "max_tokens": 1.5}', 'invalid_value'),
        (b'{"model": "echo", "prompt": "x", "stream": "yes"}', 'invalid_value'),
        (b'{"model": "echo", "prompt": "x", "best_of": 2}', 'unsupported_value'),
        (b'{"model": "echo", "prompt": "x", "echo": true}', 'unsupported_value'),
    ],
    ids=lambda value: value[:60].decode(errors='replace') if isinstance(value, bytes) else value,
)
def test_malformed_bodies(echo_server, content, code):
    headers = {'Content-Type': 'application/json'}
    response = httpx.post(echo_server.url + COMPLETIONS, content=content, headers=headers, timeout=20)
    assert response.status_code == 400, response.text
    assert code is None or error_of(response)['code'] == code


def test_chat_template_failures_are_400(echo_server):
    assert post(echo_server, CHAT, {'model': 'echo', 'messages': []}).status_code == 400
    for kwargs in ({'tokenize': True}, {'chat_template': '{{ 1 }}'}, {'messages': []}):
        response = post(echo_server, CHAT, chat(chat_template_kwargs=kwargs))
        assert (response.status_code, error_of(response)['param']) == (400, 'chat_template_kwargs')
    response = post(echo_server, CHAT, chat(reasoning_effort='high'))
    assert (response.status_code, error_of(response)['param']) == (400, 'reasoning_effort')


@pytest.mark.parametrize(
    ('more', 'message'),
    [
        ({'temperature': 'hot'}, "temperature='hot': must be a number"),
        ({'foo': 1}, 'foo=1: unknown field; leave it out; /docs lists the fields'),
        ({'temprature': 1}, 'temprature=1: unknown field; is temperature meant?'),
        ({'stream_options': {'include': True}}, 'stream_options.include=True: unknown field; leave it out'),
        ({'messages': [{'content': 'x'}]}, 'messages.0.role: is missing'),
        ({'messages': [{'role': 'boss'}]}, "messages.0.role='boss': must be one of 'system', 'developer', 'user'"),
        ({'messages': 3}, 'messages=3: must be a list or a string'),
        ({'stop': ['x', 3]}, 'stop.1=3: must be a string'),
        ({'seed': 2**64}, f'seed={2**64}: must be below {2**64}'),
        ({'response_format': {'type': 'text', 'foo': 1}}, "its type 'text' has no 'foo'"),
        ({'response_format': {'type': 'json_object', 'schema': {}}}, "use type 'json_schema'"),
        ({'response_format': {'type': 'json_schema', 'json_schema': {'schema': {}, 'a': 1}}}, "has no 'a'"),
        ({'enable_thinking': True}, "enable_thinking=True: the model's chat template does not read it"),
        ({'chat_template_kwargs': {'foo': 1}}, "does not read 'foo'"),
        ({'messages': [{'role': 'user', 'content': 'x', 'foo': 1}]}, 'messages.0.foo=1: unknown field'),
        ({'messages': None, 'input_ids': [1], 'enable_thinking': True}, 'which input_ids go without'),
    ],
    ids=lambda value: str(value)[:50],
)
def test_refusals_name_field_value_and_remedy(echo_server, more, message):
    response = post(echo_server, CHAT, chat() | more)
    assert response.status_code == 400, response.text
    text = error_of(response)['message']
    assert message in text
    assert '\n' not in text
    response = post(echo_server, COMPLETIONS, completion([]))
    assert error_of(response)['message'] == 'prompt=[]: must be a string or a list of at least 1'
    response = post(echo_server, COMPLETIONS, completion([1, 'a']))
    assert error_of(response)['message'] == "prompt.1='a': must be an integer or a list"
    response = post(echo_server, COMPLETIONS, {'model': 'echo'})
    assert error_of(response)['message'].startswith('prompt: is missing; Text or token ids')


def test_fields_that_clients_echo_are_let_through(echo_server):
    turn = {'role': 'assistant', 'content': 'x', 'refusal': None, 'annotations': [], 'audio': None, 'reasoning': 'y'}
    body = chat() | {'messages': [turn, {'role': 'user', 'content': 'hi', 'name': 'me'}]}
    assert post(echo_server, CHAT, body).status_code == 200


def test_body_needs_a_content_type_and_a_bearable_size(echo_server):
    response = httpx.post(echo_server.url + CHAT, content=b'{}', headers={'Content-Type': 'text/plain'})
    assert (response.status_code, error_of(response)['code']) == (400, 'invalid_content_type')
    with httpx.Client(timeout=60) as client:
        huge = b'{"prompt": "' + b'x' * (33 * 2**20) + b'"}'
        headers = {'Content-Type': 'application/json'}
        with contextlib.suppress(httpx.TransportError):  # the server may close while the client still sends
            assert client.post(echo_server.url + '/generate', content=huge, headers=headers).status_code == 413
    assert httpx.get(echo_server.url + '/health').status_code == 200


def test_unknown_paths_and_methods(echo_server):
    response = httpx.get(echo_server.url + '/v1/nothing')
    assert (response.status_code, error_of(response)['code']) == (404, 'not_found')
    response = httpx.get(echo_server.url + CHAT)
    assert (response.status_code, error_of(response)['code']) == (405, 'method_not_allowed')
    for path in ('/v1/messages', '/v1/responses', '/v1/embeddings', '/get_ppl'):
        assert post(echo_server, path, {}).status_code == 404


def test_too_many_requests(guarded_server):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        bodies = [completion('!slow' + ' the quick brown fox' * 20, num_speculative_tokens=0) for _ in range(4)]
        running = [pool.submit(post, guarded_server, COMPLETIONS, body, **AUTHORISED) for body in bodies]
        guarded_server.wait_for(lambda: guarded_server.metrics(**AUTHORISED)['num_requests_running'] == 4)
        response = post(guarded_server, COMPLETIONS, completion('x'), **AUTHORISED)
        assert (response.status_code, error_of(response)['code']) == (429, 'rate_limit_exceeded')
        assert int(response.headers['retry-after']) >= 1
        assert all(job.result().status_code == 200 for job in running)
    assert post(guarded_server, COMPLETIONS, completion('x'), **AUTHORISED).status_code == 200
    assert post(guarded_server, COMPLETIONS, completion(['x'] * 5), **AUTHORISED).status_code == 400


# ------------------------------------------------------------------------------------------------------------ keys
@pytest.mark.parametrize('header', [None, '', 'Bearer', 'Bearer wrong', f'Basic {KEY}', KEY, f'Bearer {KEY}x'])
def test_a_key_is_needed(guarded_server, header):
    headers = {} if header is None else {'Authorization': header}
    for method, path in (('POST', CHAT), ('GET', '/v1/models'), ('GET', '/metrics'), ('POST', '/v1/encode')):
        response = httpx.request(method, guarded_server.url + path, headers=headers)
        assert response.status_code == 401
        assert (error_of(response)['type'], error_of(response)['code']) == ('authentication_error', 'invalid_api_key')
    for path in ('/', '/health', '/page/chat.js', '/docs', '/openapi.json'):
        assert httpx.get(guarded_server.url + path, headers=headers).status_code == 200


def test_any_key_serves(guarded_server):
    for key in ('other', KEY):
        headers = {'Authorization': f'Bearer {key}'}
        assert httpx.get(guarded_server.url + '/v1/models', headers=headers).status_code == 200
    assert guarded_server.metrics(**AUTHORISED)['engine_up'] == 1


def test_cross_origin_requests(guarded_server, echo_server):
    ask = {'Origin': 'https://a.example', 'Access-Control-Request-Method': 'POST'}
    response = httpx.options(guarded_server.url + CHAT, headers=ask)
    assert response.headers['access-control-allow-origin'] == 'https://a.example'
    response = httpx.options(guarded_server.url + CHAT, headers=ask | {'Origin': 'https://b.example'})
    assert 'access-control-allow-origin' not in response.headers
    response = httpx.get(echo_server.url + '/v1/models', headers={'Origin': 'https://b.example'})
    assert response.headers['access-control-allow-origin'] == '*'


# ------------------------------------------------------------------------------------------------------- documents
def test_documents(echo_server):
    made = httpx.get(echo_server.url + '/openapi.json').json()
    assert {CHAT, COMPLETIONS, '/generate', '/v1/encode', '/abort_request'} <= set(made['paths'])
    assert made['components']['schemas']['ChatRequest']['additionalProperties'] is False
    page = httpx.get(echo_server.url + '/')
    assert page.headers['content-type'].startswith('text/html')
    assert 'http://' not in page.text
    assert 'https://' not in page.text
    assert httpx.get(echo_server.url + '/page/../api_server.py').status_code == 404
    assert httpx.get(echo_server.url + '/page/%2e%2e%2fapi_server.py').status_code == 404
