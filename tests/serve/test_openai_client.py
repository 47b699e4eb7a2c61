"""The official client against the demo model behind the real command."""

import asyncio
import json

import httpx
import openai
import pytest

from specdec import GenerationConfig, PytorchEngineConfig, SpeculativeConfig, pipeline
from tests.helpers.servers import ServerProcess

PROMPTS = ['def main():\n', 'import os\n\nclass Stack:\n', 'for i in range(10):\n    print(', 'def read_lines(path):\n']


@pytest.fixture(scope='module')
def client(demo_server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f'{demo_server.url}/v1', api_key='none', max_retries=0, timeout=120)


@pytest.fixture(scope='module')
def offline() -> list[str]:
    """What the Python interface answers, greedily, 48 tokens."""
    with pipeline('demo', PytorchEngineConfig(), speculative_config=SpeculativeConfig('dspark')) as pipe:
        config = GenerationConfig(max_new_tokens=48, do_sample=False, ignore_eos=True)
        return [response.text for response in pipe(PROMPTS, config)]


def ask(client: openai.OpenAI, prompt: str = PROMPTS[0], **wishes):
    extra = {'ignore_eos': True} | wishes.pop('extra_body', {})
    settings = {'temperature': 0, 'max_tokens': 48, 'extra_body': extra} | wishes
    return client.chat.completions.create(model='demo', messages=[{'role': 'user', 'content': prompt}], **settings)


def test_models(client):
    assert [model.id for model in client.models.list()] == ['demo']
    assert client.models.retrieve('demo').owned_by == 'specdec'
    with pytest.raises(openai.NotFoundError, match="'gpt-4' does not exist"):
        client.models.retrieve('gpt-4')


def test_chat_equals_the_python_interface(client, offline):
    for prompt, text in zip(PROMPTS, offline):
        answer = ask(client, prompt)
        assert answer.choices[0].message.content == text
        assert answer.choices[0].finish_reason == 'length'
        assert answer.usage.completion_tokens == 48
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 48
        assert answer.object == 'chat.completion'


def test_stream_equals_the_whole(client, offline):
    chunks = list(ask(client, stream=True, stream_options={'include_usage': True}))
    assert ''.join(c.choices[0].delta.content or '' for c in chunks if c.choices) == offline[0]
    assert [c.choices[0].delta.role for c in chunks if c.choices].count('assistant') == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 48
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1
    assert chunks[-2].choices[0].finish_reason == 'length'
    assert len(chunks) < 48, 'a chunk a step, several tokens in each'


def test_plain_decoding_gives_the_same(client, offline):
    answer = ask(client, PROMPTS[1], extra_body={'speculative': False, 'return_speculation': True})
    assert answer.choices[0].message.content == offline[1]
    assert answer.speculation == {'steps': 47, 'drafted': 0, 'accepted': 0, 'mean_accepted_length': 1.0}
    capped = ask(client, PROMPTS[1], extra_body={'num_speculative_tokens': 2, 'return_speculation': True})
    assert capped.choices[0].message.content == offline[1]
    assert capped.speculation['drafted'] <= 2 * capped.speculation['steps']
    assert 1 + capped.speculation['steps'] + capped.speculation['accepted'] == 48


def test_async_client_and_many_streams(demo_server, offline):
    async def body() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f'{demo_server.url}/v1', api_key='none', timeout=120) as client:

            async def one(prompt: str) -> str:
                stream = await client.completions.create(
                    model='demo', prompt=prompt, max_tokens=48, temperature=0, stream=True,
                    extra_body={'ignore_eos': True},
                )  # fmt: skip
                return ''.join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(prompt) for prompt in PROMPTS * 4))

    assert asyncio.run(body()) == offline * 4


def test_completions_with_several_prompts(client, offline):
    answer = client.completions.create(
        model='demo', prompt=PROMPTS, max_tokens=48, temperature=0, extra_body={'ignore_eos': True}
    )
    assert [choice.text for choice in answer.choices] == offline
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.completion_tokens == 4 * 48
    texts = [''] * 4
    for chunk in client.completions.create(
        model='demo', prompt=PROMPTS, max_tokens=48, temperature=0, stream=True, extra_body={'ignore_eos': True}
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == offline


def test_completion_takes_token_ids_and_16_tokens_by_default(client, demo_server):
    ids = httpx.post(f'{demo_server.url}/v1/encode', json={'input': PROMPTS[0]}).json()['input_ids']
    one = client.completions.create(model='demo', prompt=ids, temperature=0, extra_body={'ignore_eos': True})
    two = client.completions.create(model='demo', prompt=PROMPTS[0], temperature=0, extra_body={'ignore_eos': True})
    assert one.choices[0].text == two.choices[0].text
    assert one.usage.completion_tokens == 16
    assert one.usage.prompt_tokens == len(ids)


def test_seeds(client):
    def text(**wishes) -> str:
        return ask(client, temperature=1.0, **wishes).choices[0].message.content

    assert text(seed=7) == text(seed=7) == text(seed=7, extra_body={'speculative': False})
    assert len({text(seed=seed) for seed in range(4)}) == 4


def test_stop_strings(client, offline):
    whole = offline[0]
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    answer = ask(client, stop=[stop, 'no such text'])
    expected = whole[: whole.index(stop)]
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == 'stop'
    pieces = [c.choices[0].delta.content or '' for c in ask(client, stop=stop, stream=True)]
    assert ''.join(pieces) == expected


def test_logprobs(client):
    answer = ask(client, logprobs=True, top_logprobs=3, max_tokens=8)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 8
    assert b''.join(bytes(e.bytes) for e in entries).decode() == answer.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert [t.logprob for t in entry.top_logprobs] == sorted((t.logprob for t in entry.top_logprobs), reverse=True)
    streamed = [e for c in ask(client, logprobs=True, max_tokens=8, stream=True) if c.choices[0].logprobs
                for e in c.choices[0].logprobs.content]  # fmt: skip
    assert [e.token for e in streamed] == [e.token for e in entries]
    assert [e.logprob for e in streamed] == pytest.approx([e.logprob for e in entries], abs=1e-4)
    old = client.completions.create(model='demo', prompt=PROMPTS[0], temperature=0, logprobs=2, max_tokens=5)
    assert old.choices[0].logprobs.text_offset[0] == 0
    assert ''.join(old.choices[0].logprobs.tokens) == old.choices[0].text
    assert [len(top) for top in old.choices[0].logprobs.top_logprobs] == [2] * 5


def test_sampling_follows_the_checkpoint_unless_told(client):
    sampled = {ask(client, temperature=openai.omit).choices[0].message.content for _ in range(4)}
    assert len(sampled) > 1


@pytest.mark.parametrize(
    ('wishes', 'kind', 'param', 'code'),
    [
        ({'temperature': 2.5}, openai.BadRequestError, 'temperature', 'invalid_value'),
        ({'temperature': 'warm'}, openai.BadRequestError, 'temperature', 'invalid_value'),
        ({'top_logprobs': 3}, openai.BadRequestError, 'top_logprobs', 'invalid_value'),
        ({'web_search_options': {'search_context_size': 'low'}}, openai.BadRequestError, 'web_search_options', None),
        ({'max_tokens': 0}, openai.BadRequestError, 'max_tokens', 'invalid_value'),
        ({'stop': ['']}, openai.BadRequestError, 'stop', 'invalid_value'),
        ({'tools': [{'type': 'function', 'function': {'name': 'f'}}]}, openai.BadRequestError, 'tools', None),
        ({'extra_body': {'temprature': 1}}, openai.BadRequestError, 'temprature', 'unknown_field'),
        ({'stream_options': {'include_usage': True}}, openai.BadRequestError, 'stream_options', 'invalid_value'),
    ],
)
def test_bad_values_name_the_field(client, wishes, kind, param, code):
    with pytest.raises(kind) as raised:
        ask(client, **wishes)
    assert raised.value.param == param
    assert code is None or raised.value.code == code
    assert raised.value.type == 'invalid_request_error'


def test_neutral_and_idle_fields_are_accepted(client):
    ask(
        client, max_tokens=1, user='me', metadata={'a': 'b'}, store=True, service_tier='auto', prompt_cache_key='k',
        safety_identifier='s', presence_penalty=0, frequency_penalty=0, logit_bias={}, n=1, verbosity='medium',
        response_format={'type': 'text'}, modalities=['text'], parallel_tool_calls=True,
    )  # fmt: skip


def test_overlong_prompt(client):
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, 'word ' * 2000)
    assert raised.value.code == 'context_length_exceeded'
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, 'word ' * 2_000_000)
    assert raised.value.code == 'context_length_exceeded'


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as raised:
        client.completions.create(model='other', prompt='x')
    assert raised.value.code == 'model_not_found'


def test_usage_tells_of_the_prefix_cache(client):
    prompt = '# a prompt of several pages\n' + ''.join(f'value_{i} = {i}\n' for i in range(20))
    first, second = (ask(client, prompt, max_tokens=2) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens_details.cached_tokens
    assert second.usage.prompt_tokens_details.cached_tokens % 16 == 0


def test_metrics_hold_the_identity(client, demo_server):
    """emitted = prefill firsts + decode steps + accepted, after stop strings and limits."""
    for prompt in PROMPTS:
        ask(client, prompt, stop=['e', 'r'], max_tokens=30)
        ask(client, prompt, extra_body={'speculative': False}, max_tokens=7)
    metrics = demo_server.metrics()
    emitted = metrics['generation_tokens_total']
    steps, accepted = metrics['decode_steps_total'], metrics['spec_decode_num_accepted_tokens_total']
    assert emitted == metrics['prefill_first_tokens_total'] + steps + accepted
    assert metrics['verified_rows_total'] == steps + metrics['spec_decode_num_draft_tokens_total']
    assert metrics['spec_decode_num_drafts_total'] < steps, 'plain requests are no drafting steps'
    assert metrics['spec_decode_mean_accept_length'] == 1 + accepted / metrics['spec_decode_num_drafts_total']
    positions = [metrics[f'spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}'] for i in range(7)]
    assert sum(positions) == accepted
    assert positions == sorted(positions, reverse=True)
    assert metrics['request_generation_tokens_sum'] == emitted
    demo_server.wait_until_idle()


# ------------------------------------------------------------------------------------------------ rules and grammars
def test_choices_have_consecutive_seeds(client):
    def sampled(seed: int, n: int):
        return ask(client, temperature=1.0, seed=seed, n=n, max_tokens=24)

    several = sampled(11, 3)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    alone = [sampled(11 + i, 1).choices[0].message.content for i in range(3)]
    assert [choice.message.content for choice in several.choices] == alone
    assert several.usage.completion_tokens == 72
    assert several.usage.prompt_tokens == sampled(11, 1).usage.prompt_tokens
    streamed = ['', '', '']
    for chunk in ask(client, temperature=1.0, seed=11, n=3, max_tokens=24, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ''
    assert streamed == alone


def test_rules_act(client, offline):
    plain = ask(client).choices[0]
    for extra in ({'repetition_penalty': 1.5}, {'bad_words': [plain.message.content.split()[0]]}):
        assert ask(client, extra_body=extra).choices[0].message.content != offline[0]
    for wishes in ({'presence_penalty': 2}, {'frequency_penalty': 2}, {'logit_bias': {'5': 100}}):
        assert ask(client, **wishes).choices[0].message.content != offline[0]
    short = ask(client, extra_body={'repetition_ngram_size': 1, 'repetition_ngram_threshold': 2}).choices[0]
    assert short.finish_reason == 'stop'
    assert offline[0].startswith(short.message.content)
    for wishes in ({'logit_bias': {'x': 1}}, {'logit_bias': {'5000': 1}}, {'presence_penalty': 3}, {'n': 0}):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, **wishes)
        assert caught.value.param == next(iter(wishes))


def test_structured_output(client):
    pytest.importorskip('xgrammar')
    schema = {'type': 'object', 'properties': {'x': {'enum': ['a', 'ü']}}, 'required': ['x']}
    wanted = {'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': schema}}
    for stream in (False, True):
        answer = ask(client, temperature=1.0, seed=3, max_tokens=200, response_format=wanted, stream=stream,
                     extra_body={'ignore_eos': False})  # fmt: skip
        text = (
            ''.join(c.choices[0].delta.content or '' for c in answer if c.choices)
            if stream
            else answer.choices[0].message.content
        )
        assert json.loads(text)['x'] in ('a', 'ü')
    with pytest.raises(openai.BadRequestError, match='response_format'):
        ask(client, response_format={'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': {'type': 'no'}}})
