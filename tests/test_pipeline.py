import dataclasses
import gc
import logging
import subprocess
import sys
import threading
import time
import weakref

import pytest

import specdec
from specdec import ConfigError, EngineError, GenerationConfig, Pipeline, RequestError, Response, pipeline
from specdec.engine.tokenizer import Tokenizer
from tests.helpers.fake_engine import DEFAULT_INFO, FakeEngine, in_steps
from tests.helpers.tokenizers import byte_level_folder

ENDLESS_INFO = dataclasses.replace(DEFAULT_INFO, session_len=10**6)
LONG = GenerationConfig(max_new_tokens=None)


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
    return Tokenizer.load(byte_level_folder(tmp_path_factory.mktemp('tokenizer')))


@pytest.fixture
def echo(tokenizer):
    """A pipeline that answers with its own prompt, and its engine."""
    engine = FakeEngine(lambda request: in_steps(request.prompt_ids, 3))
    with Pipeline.from_engine(engine, tokenizer) as pipe:
        yield pipe, engine


def endless(_):
    return [[10]] * 100_000


ALL = GenerationConfig(skip_special_tokens=False, ignore_eos=True)


# -------------------------------------------------------------------------------------------------- prompt forms
def test_prompt_forms(echo):
    pipe, _ = echo
    rendered = '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n'
    messages = [{'role': 'user', 'content': 'hi'}]
    assert pipe('hi', ALL).text == rendered
    assert pipe(messages, ALL).text == rendered
    assert pipe('hi', ALL, do_preprocess=False).text == 'hi'
    assert [r.text for r in pipe(['hi', messages], ALL)] == [rendered, rendered]
    assert [r.text for r in pipe([messages, messages], ALL)] == [rendered, rendered]
    assert [r.text for r in pipe(('a', 'b', 'c'), ALL, do_preprocess=False)] == ['a', 'b', 'c']
    assert [r.text for r in pipe((word for word in 'ab'), ALL, do_preprocess=False)] == ['a', 'b']
    assert pipe([]) == []
    assert pipe.batch_infer(['a'], ALL, False)[0].text == 'a'
    assert pipe('hi', ALL, enable_thinking=False).text.endswith('<think>\n\n</think>\n\n')
    assert pipe('hi', ALL, chat_template_kwargs={'enable_thinking': False}).text.endswith('</think>\n\n')


def test_a_plain_string_needs_no_chat_template(tmp_path):
    tokenizer = Tokenizer.load(byte_level_folder(tmp_path, chat_template=None))
    with Pipeline.from_engine(FakeEngine(lambda r: in_steps(r.prompt_ids, 3)), tokenizer) as pipe:
        assert pipe('hi').text == 'hi'
        response = pipe([{'role': 'user', 'content': 'hi'}])
        assert (response.finish_reason, response.error_code) == ('error', 'invalid_value')


@pytest.mark.parametrize(
    ('bad', 'code', 'text'),
    [
        ('', 'empty_prompt', 'at least one token'),
        ('long ' * 300, 'context_length_exceeded', 'session_len=256'),
        (('describe', 'http://image'), 'invalid_value', 'images cannot be served'),
        ([{'role': 'user', 'content': [{'type': 'image_url'}]}], 'invalid_value', 'no images'),
        ([{'content': 'hi'}], 'invalid_value', "'role'"),
        (17, 'invalid_value', 'must be text'),
        ([], 'invalid_value', 'must be text'),
        ('\ud800', 'invalid_value', 'surrogate'),
    ],
)
def test_a_bad_prompt_fails_alone(echo, bad, code, text):
    pipe, _ = echo
    good, failed, also_good = pipe(['a', bad, 'b'], ALL)
    assert (good.finish_reason, also_good.finish_reason) == ('length', 'length')
    assert (failed.finish_reason, failed.error_code, failed.index, failed.text) == ('error', code, 1, '')
    assert text in failed.error_message
    assert '\n' not in failed.error_message


@pytest.mark.parametrize('prompts', [17, None, {'role': 'user'}, b'bytes'])
def test_what_is_no_prompt_at_all_raises(echo, prompts):
    with pytest.raises(RequestError, match='prompts='):
        echo[0](prompts)


def test_order_and_number_in_flight(tokenizer):
    engine = FakeEngine(lambda request: in_steps([*request.prompt_ids] * (1 + len(request.prompt_ids) % 3), 2))
    pulled = []

    def prompts():
        for i in range(50):
            pulled.append(i)
            assert i - engine.num_finished <= DEFAULT_INFO.max_batch_size
            yield 'x' * (1 + i % 7)

    with Pipeline.from_engine(engine, tokenizer) as pipe:
        responses = pipe(prompts(), do_preprocess=False)
    assert [response.index for response in responses] == list(range(50)) == pulled
    assert [response.input_token_len for response in responses] == [
        len(tokenizer.encode('x' * (1 + i % 7))) for i in range(50)
    ]
    assert engine.most_in_flight == DEFAULT_INFO.max_batch_size


def test_one_config_for_each_prompt(echo):
    pipe, engine = echo
    configs = [GenerationConfig(max_new_tokens=n) for n in (1, 2, 3)]
    responses = pipe(['abcdefgh'] * 3, configs, do_preprocess=False)
    assert [response.generate_token_len for response in responses] == [1, 2, 3]
    with pytest.raises(ValueError, match='there are 2 prompts'):
        pipe(['a', 'b'], configs)
    with pytest.raises(RequestError, match='needs a list of prompts'):
        pipe(iter(['a', 'b', 'c']), configs)
    with pytest.raises(RequestError, match='must be a GenerationConfig'):
        pipe('a', {'max_new_tokens': 3})
    assert len(engine.requests) == 3


# ------------------------------------------------------------------------------------------------------ streaming
def test_stream_interleaves_and_adds_up(echo):
    pipe, _ = echo
    texts = ['The quick brown fox 你好 😀 ' * n for n in (1, 3, 2)]
    whole = {index: Response() for index in range(3)}
    order = []
    for piece in pipe.stream_infer(texts, gen_config=ALL, do_preprocess=False):
        assert whole[piece.index].finish_reason is None
        whole[piece.index].extend(piece)
        order.append(piece.index)
    assert [response.text for response in whole.values()] == texts
    assert order != sorted(order)
    again = pipe(texts, ALL, do_preprocess=False)
    for streamed, at_once in zip(whole.values(), again):
        at_once.seed = streamed.seed
        assert streamed == at_once


def test_every_step_is_a_piece_and_the_last_is_empty(echo):
    pipe, _ = echo
    pieces = list(pipe.stream_infer('8-letter', gen_config=ALL, do_preprocess=False))
    assert len(pipe.tokenizer.encode('8-letter')) == 7
    assert [len(piece.token_ids) for piece in pieces] == [1, 3, 3, 0]
    assert [piece.speculation.steps for piece in pieces] == [0, 1, 2, 2]
    assert (pieces[-1].text, pieces[-1].finish_reason) == ('', 'length')
    (piece,) = pipe.stream_infer('8-letter', gen_config=ALL, do_preprocess=False, stream_response=False)
    assert piece.text == '8-letter'


def test_leaving_a_stream_aborts(tokenizer):
    engine = FakeEngine(endless, ENDLESS_INFO)
    with Pipeline.from_engine(engine, tokenizer) as pipe:
        for _ in pipe.stream_infer(['a', 'b'], gen_config=LONG):
            break
        deadline = time.monotonic() + 5
        while engine.has_work() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sorted(engine.aborted) == [1, 2]


def test_stop_string_ends_a_stream_and_the_engines_work(tokenizer):
    ids = tokenizer.encode('one STOP two ') * 3000
    engine = FakeEngine(lambda _: in_steps(ids, 2), ENDLESS_INFO)
    config = GenerationConfig(max_new_tokens=None, stop_words=['STOP'])
    with Pipeline.from_engine(engine, tokenizer) as pipe:
        assert pipe('x', config).text == 'one '
        assert pipe('x', config).finish_reason == 'stop'
    assert engine.num_steps < 6000


def test_threads_share_a_pipeline(echo):
    pipe, _ = echo
    results = {}

    def work(name):
        results[name] = [response.text for response in pipe([f'{name}{i}' for i in range(20)], ALL, False)]

    threads = [threading.Thread(target=work, args=(name,)) for name in 'abc']
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: [f'{name}{i}' for i in range(20)] for name in 'abc'}


# ----------------------------------------------------------------------------------------------------------- chat
def test_chat_keeps_history(tokenizer):
    answers = iter(['first answer', 'second answer'])
    engine = FakeEngine(lambda _: in_steps(tokenizer.encode(next(answers)), 2))
    with Pipeline.from_engine(engine, tokenizer) as pipe:
        session = pipe.chat('hello')
        assert session.response.text == 'first answer'
        pieces = pipe.chat('and now?', session, stream_response=True)
        assert ''.join(piece.text for piece in pieces) == 'second answer'
        assert session.history == [('hello', 'first answer'), ('and now?', 'second answer')]
        text = tokenizer.decode(engine.requests[2].prompt_ids, skip_special_tokens=False)
        assert text == (
            '<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nfirst answer<|im_end|>\n'
            '<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n'
        )
        session.reset()
        assert (session.history, session.response) == ([], None)


def test_chat_error_does_not_join_the_history(echo):
    session = echo[0].chat('long ' * 300)
    assert (session.response.finish_reason, session.history) == ('error', [])


def test_session_abort(tokenizer):
    with Pipeline.from_engine(FakeEngine(endless, ENDLESS_INFO), tokenizer) as pipe:
        session = pipe.session()
        pieces = pipe.chat('hello', session, LONG, stream_response=True)
        next(pieces)
        session.abort()
        *_, last = pieces
        assert last.finish_reason == 'abort'
        assert session.history == [('hello', session.response.text)]
        session.abort()
        session.close()
        assert session.history == []
        assert pipe.stream_infer('x', session, gen_config=LONG) is not None


# ------------------------------------------------------------------------------------------------ end and failure
def test_close_ends_what_is_running(tokenizer):
    pipe = Pipeline.from_engine(FakeEngine(endless, ENDLESS_INFO), tokenizer)
    responses = []
    thread = threading.Thread(target=lambda: responses.extend(pipe(['a'] * 10, LONG)))
    thread.start()
    time.sleep(0.1)
    pipe.close()
    thread.join(5)
    assert not thread.is_alive()
    reasons = [response.finish_reason for response in responses]
    assert reasons == ['abort'] * 4 + ['error'] * 6
    with pytest.raises(EngineError, match='closed'):
        pipe('x')
    pipe.close()


def test_engine_failure(tokenizer):
    with Pipeline.from_engine(FakeEngine(endless, fail_at=3), tokenizer) as pipe:
        responses = pipe(['a'] * 6)
        assert {response.error_code for response in responses} == {'engine_error'}
        with pytest.raises(EngineError, match='the device is on fire'):
            pipe('x')


def test_settings_in_the_place_of_sessions(tokenizer):
    hint = r'sessions=.*settings go by name: gen_config='
    with Pipeline.from_engine(FakeEngine(endless), tokenizer) as pipe, pytest.raises(RequestError, match=hint):
        list(pipe.stream_infer(['a'], GenerationConfig()))


def test_a_dropped_pipeline_closes_its_engine(tokenizer):
    engine = FakeEngine(lambda r: in_steps(r.prompt_ids, 3))
    pipe = Pipeline.from_engine(engine, tokenizer)
    pipe('x')
    gone = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert gone() is None
    assert engine.closed


# ------------------------------------------------------------------------------------------------------- settings
@pytest.mark.parametrize(
    ('arguments', 'field'),
    [
        ({'model_format': 'awq'}, 'model_format'),
        ({'backend_config': {'tp': 1}}, 'backend_config'),
        ({'speculative_config': 'dflash'}, 'speculative_config'),
        ({'chat_template_config': 'x'}, 'chat_template_config'),
        ({'allowed_media_domains': ['x']}, 'allowed_media_domains'),
        ({'log_level': 'LOUD'}, 'log_level'),
        ({'trust_remote_code': 'yes'}, 'trust_remote_code'),
    ],
)
def test_unknown_and_wrong_arguments_are_refused(arguments, field):
    with pytest.raises(ConfigError) as raised:
        pipeline('/no/model', **arguments)
    assert raised.value.field == field


def test_calls_refuse_what_they_do_not_know(echo):
    pipe, _ = echo
    for call in (pipe, pipe.stream_infer, pipe.chat):
        with pytest.raises(ConfigError, match='has no such argument'):
            call('x', temperature=3)
        with pytest.raises(ConfigError, match='adapters are not served'):
            call('x', adapter_name='lora')
    for call in (pipe.get_ppl, pipe.get_reward_score):
        with pytest.raises(ConfigError, match=call.__name__):
            call([1, 2])


def test_progress_bar_when_asked_for(echo, capsys):
    pipe, _ = echo
    pipe(['a'] * 3, ALL, use_tqdm=True)
    assert '3/3' in capsys.readouterr().err
    pipe(['a'] * 20, ALL)
    assert capsys.readouterr() == ('', '')


def test_prompts_are_logged_up_to_a_length(tokenizer, caplog):
    engine = FakeEngine(lambda r: in_steps(r.prompt_ids, 3))
    with Pipeline.from_engine(engine, tokenizer, max_log_len=4) as pipe, caplog.at_level(logging.INFO, 'specdec'):
        pipe('abcdefgh', ALL, do_preprocess=False)
    assert "'abcd'" in caplog.text
    assert 'abcde' not in caplog.text


def test_public_names_load_nothing_heavy():
    code = (
        'import sys, specdec; from specdec import *; import specdec.pipeline\n'
        'heavy = {"torch", "transformers", "rich", "typer", "fastapi", "pydantic", "asyncio"} & set(sys.modules)\n'
        'assert not heavy, heavy\n'
        'assert specdec.pipeline is pipeline and callable(pipeline)\n'
    )
    subprocess.run([sys.executable, '-c', code], check=True)
    assert set(specdec.__all__) <= set(dir(specdec))
