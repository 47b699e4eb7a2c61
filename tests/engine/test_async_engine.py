import asyncio
import dataclasses
import logging
import random
import threading

import pytest

from specdec.engine.async_engine import AsyncEngine
from specdec.engine.client import ThreadClient
from specdec.engine.tokenizer import Tokenizer
from specdec.errors import EngineError, RequestError
from specdec.messages import GenerationConfig, Response, SpeculationStats
from tests.helpers.fake_engine import DEFAULT_INFO, FakeEngine, in_steps
from tests.helpers.tokenizers import byte_level_folder

PROMPT = (1, 2, 3)
LONG = GenerationConfig(max_new_tokens=None)


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
    return Tokenizer.load(byte_level_folder(tmp_path_factory.mktemp('tokenizer')))


def run(engine, tokenizer, body, defaults=None):
    """Runs `body(async_engine)` on a loop of its own."""

    async def main():
        async_engine = AsyncEngine(ThreadClient(engine), tokenizer, defaults)
        await async_engine.start()
        try:
            return await asyncio.wait_for(body(async_engine), 20)
        finally:
            async_engine.close()

    return asyncio.run(main())


def collect(engine, tokenizer, config=LONG, prompt_ids=PROMPT, **options):
    async def body(async_engine):
        return [piece async for piece in async_engine.generate(prompt_ids, config, **options)]

    return run(engine, tokenizer, body)


def fold(pieces) -> Response:
    whole = Response()
    for piece in pieces:
        whole.extend(piece)
    return whole


# ------------------------------------------------------------------------------------------------------ streaming
@pytest.mark.parametrize('step_size', [1, 2, 3, 7])
def test_stream_adds_up(tokenizer, step_size):
    text = 'def main(argument): 你好 😀 return 안녕하세요'
    ids = tokenizer.encode(text)
    pieces = collect(FakeEngine(lambda _: in_steps(ids, step_size)), tokenizer)
    whole = fold(pieces)
    assert (whole.text, whole.token_ids, whole.finish_reason) == (text, ids, 'length')
    assert (whole.generate_token_len, whole.input_token_len, whole.cached_tokens) == (len(ids), 3, 2)
    assert not any('\ufffd' in piece.text for piece in pieces)
    assert (pieces[-1].text, pieces[-1].token_ids) == ('', [])
    assert all(piece.finish_reason is None and piece.token_ids for piece in pieces[:-1])
    assert whole.seed is not None


def test_without_streaming_there_is_one_piece(tokenizer):
    ids = tokenizer.encode('def main(argument): return argument')
    (piece,) = collect(FakeEngine(lambda _: in_steps(ids, 2)), tokenizer, stream_response=False)
    assert (piece.text, piece.token_ids, piece.finish_reason) == (tokenizer.decode(ids), ids, 'length')


def test_a_slow_reader_gets_everything_in_few_pieces(tokenizer):
    ids = tokenizer.encode('The quick brown fox jumps over the lazy dog. ') * 5
    engine = FakeEngine(lambda _: in_steps(ids, 2))

    async def body(async_engine):
        pieces = []
        async for piece in async_engine.generate(PROMPT, LONG):
            pieces.append(piece)
            await asyncio.sleep(0.05)
        return pieces

    pieces = run(engine, tokenizer, body)
    assert fold(pieces).token_ids == ids
    assert len(pieces) <= 4


def test_many_requests_at_once(tokenizer):
    rng = random.Random(0)
    texts = [tokenizer.encode('The quick brown fox 你好 😀 ' * rng.randrange(1, 9)) for _ in range(40)]
    engine = FakeEngine(lambda request: in_steps(texts[request.prompt_ids[0]], rng.randrange(1, 6)))

    async def body(async_engine):
        async def one(i):
            return fold([piece async for piece in async_engine.generate((i,), LONG)])

        return await asyncio.gather(*map(one, range(40)))

    for ids, whole in zip(texts, run(engine, tokenizer, body)):
        assert (whole.token_ids, whole.text) == (ids, tokenizer.decode(ids))


# ---------------------------------------------------------------------------------------------- stops and counts
def test_stop_token_is_counted_but_not_shown(tokenizer):
    engine = FakeEngine(lambda _: [[10], [11, 12, 99, 13], [14]])
    whole = fold(collect(engine, tokenizer, GenerationConfig(max_new_tokens=5, stop_token_ids=[99], logprobs=0)))
    assert (whole.token_ids, whole.generate_token_len, whole.finish_reason) == ([10, 11, 12], 3, 'stop')
    assert [list(entry) for entry in whole.logprobs] == [[10], [11], [12]]
    assert whole.speculation == SpeculationStats(steps=1, drafted=3, accepted=2)


def test_stop_token_alone_in_a_step_counts_as_a_step(tokenizer):
    whole = fold(collect(FakeEngine(lambda _: [[10], [99]]), tokenizer, GenerationConfig(stop_token_ids=[99])))
    assert whole.speculation == SpeculationStats(steps=1, drafted=3, accepted=0)
    assert whole.speculation.mean_accepted_length == 1.0


def test_first_token_may_be_the_stop_token(tokenizer):
    pieces = collect(FakeEngine(lambda _: [[99]]), tokenizer, GenerationConfig(stop_token_ids=[99]))
    assert len(pieces) == 1
    assert (pieces[0].text, pieces[0].token_ids, pieces[0].finish_reason) == ('', [], 'stop')
    assert pieces[0].speculation == SpeculationStats()


def test_stop_token_can_be_included(tokenizer):
    end_id = tokenizer.eos_id
    ids = tokenizer.encode('return argument')
    config = GenerationConfig(include_stop_str_in_output=True, skip_special_tokens=False)
    whole = fold(collect(FakeEngine(lambda _: in_steps([*ids, end_id, 5], 3)), tokenizer, config))
    assert (whole.token_ids, whole.text) == ([*ids, end_id], 'return argument<|im_end|>')
    assert whole.generate_token_len == len(ids) + 1


@pytest.mark.parametrize('step_size', range(1, 9))
def test_stop_string_cuts_text_ids_logprobs_and_counts(tokenizer, step_size):
    ids = tokenizer.encode('return argument + 1\n\nThe quick brown fox jumps')
    cut = next(n for n in range(len(ids)) if 'quick' in tokenizer.decode(ids[:n]))
    engine = FakeEngine(lambda _: in_steps(ids, step_size))
    whole = fold(collect(engine, tokenizer, GenerationConfig(stop_words=['quick', 'fox'], logprobs=1)))
    assert (whole.text, whole.finish_reason) == ('return argument + 1\n\nThe ', 'stop')
    assert whole.token_ids == ids[:cut]
    assert len(whole.logprobs) == whole.generate_token_len == cut
    num_steps = -(-(cut - 1) // step_size)
    assert whole.speculation == SpeculationStats(num_steps, 3 * num_steps, cut - 1 - num_steps)
    assert 1 + whole.speculation.steps + whole.speculation.accepted == cut


def test_stop_string_aborts_the_engines_request(tokenizer):
    ids = tokenizer.encode('one two STOP three four five six seven eight nine')
    engine = FakeEngine(lambda _: in_steps(ids * 4, 1))

    async def body(async_engine):
        whole = fold([piece async for piece in async_engine.generate(PROMPT, GenerationConfig(stop_words=['STOP']))])
        while engine.has_work():
            await asyncio.sleep(0.01)
        assert async_engine.num_live == 0
        return whole

    assert run(engine, tokenizer, body).text == 'one two '
    assert len(engine.aborted) <= 1


def test_stop_wins_over_length(tokenizer):
    ids = tokenizer.encode('a b STOP')
    config = GenerationConfig(max_new_tokens=len(ids), stop_words=['STOP'])
    assert fold(collect(FakeEngine(lambda _: in_steps(ids, 3)), tokenizer, config)).finish_reason == 'stop'
    config = GenerationConfig(max_new_tokens=3, stop_token_ids=[12])
    whole = fold(collect(FakeEngine(lambda _: [[10], [11, 12, 13]]), tokenizer, config))
    assert (whole.token_ids, whole.finish_reason) == ([10, 11], 'stop')


def test_held_back_text_is_given_out_at_the_end(tokenizer):
    ids = tokenizer.encode('the answer </ans')
    whole = fold(collect(FakeEngine(lambda _: in_steps(ids, 2)), tokenizer, GenerationConfig(stop_words=['</answer>'])))
    assert whole.text == 'the answer </ans'


def test_stop_string_respects_the_minimum(tokenizer):
    ids = tokenizer.encode('\n' * 3 + 'x\n')
    config = GenerationConfig(stop_words=['\n'], min_new_tokens=len(ids))
    whole = fold(collect(FakeEngine(lambda _: in_steps(ids, 4)), tokenizer, config))
    assert whole.token_ids == ids
    assert whole.text == tokenizer.decode(ids)[:-1]


# --------------------------------------------------------------------------------------------- aborts and failures
def endless(_):
    return [[10]] * 100_000


def wide_info(**changes):
    return dataclasses.replace(DEFAULT_INFO, **changes)


def test_closing_and_cancelling_abort(tokenizer):
    engine = FakeEngine(endless, wide_info(session_len=10**6))

    async def body(async_engine):
        pieces = async_engine.generate(PROMPT, LONG)
        await anext(pieces)
        await pieces.aclose()

        async def read():
            async for _ in async_engine.generate(PROMPT, LONG):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert async_engine.num_live == 0
        while engine.has_work():
            await asyncio.sleep(0.01)

    run(engine, tokenizer, body)
    assert engine.aborted == [1, 2]


@pytest.mark.parametrize('closes', [False, True])
def test_abort_by_id_and_close_end_the_stream(tokenizer, closes):
    async def body(async_engine):
        request_id = async_engine.new_request_id()
        pieces = []
        async for piece in async_engine.generate(PROMPT, LONG, request_id=request_id):
            pieces.append(piece)
            if len(pieces) == 2:
                if closes:
                    async_engine.close()
                else:
                    assert async_engine.abort(request_id)
                    assert not async_engine.abort(request_id)
        return pieces

    pieces = run(FakeEngine(endless, wide_info(session_len=10**6)), tokenizer, body)
    assert pieces[-1].finish_reason == 'abort'
    assert fold(pieces).generate_token_len == len(fold(pieces).token_ids) > 0


def test_engine_failure_ends_streams_with_an_error(tokenizer):
    engine = FakeEngine(endless, fail_at=4)

    async def body(async_engine):
        whole = fold([piece async for piece in async_engine.generate(PROMPT, LONG)])
        with pytest.raises(EngineError, match='on fire'):
            await anext(async_engine.generate(PROMPT, LONG))
        assert isinstance(async_engine.failure, RuntimeError)
        assert async_engine.num_live == 0
        return whole

    whole = run(engine, tokenizer, body)
    assert (whole.finish_reason, whole.error_code) == ('error', 'engine_error')
    assert whole.error_message == 'the engine failed: RuntimeError: the device is on fire'
    assert whole.token_ids == [10, 10, 10]


def test_refusal_by_the_engine_concerns_one_request(tokenizer):
    engine = FakeEngine(endless, refuse=RequestError('prompt', 9, 'needs more pages than there are', 'no_memory'))
    (piece,) = collect(engine, tokenizer)
    assert (piece.finish_reason, piece.error_code) == ('error', 'no_memory')
    assert 'more pages' in piece.error_message


def test_closed_engine_refuses(tokenizer):
    async def body(async_engine):
        async_engine.close()
        with pytest.raises(EngineError, match='closed'):
            await anext(async_engine.generate(PROMPT, LONG))

    run(FakeEngine(endless), tokenizer, body)


def test_random_aborts_leave_the_others_alone(tokenizer):
    ids = tokenizer.encode('The quick brown fox jumps over the lazy dog. ' * 4)
    engine = FakeEngine(lambda _: in_steps(ids, 3))

    async def body(async_engine):
        rng = random.Random(0)

        async def one(leaves_after):
            pieces = async_engine.generate(PROMPT, LONG)
            got = []
            async for piece in pieces:
                got.append(piece)
                if len(got) == leaves_after:
                    await pieces.aclose()
                    return None
            return fold(got)

        answers = await asyncio.gather(*(one(rng.choice([0, 0, 1, 2])) for _ in range(60)))
        assert async_engine.num_live == 0
        return [answer for answer in answers if answer is not None]

    answers = run(engine, tokenizer, body)
    assert answers
    assert all(answer.token_ids == ids for answer in answers)


def test_a_gate_that_opens_late_does_not_block_the_loop(tokenizer):
    gate = threading.Event()

    async def body(async_engine):
        pieces = async_engine.generate(PROMPT, LONG)
        waiting = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        gate.set()
        await waiting
        await pieces.aclose()

    run(FakeEngine(endless, gate=gate), tokenizer, body)


# ---------------------------------------------------------------------------------------------------- settings
def submitted(tokenizer, config, prompt_ids=PROMPT, **changes):
    engine = FakeEngine(lambda _: [[10]], wide_info(**changes))
    collect(engine, tokenizer, config, prompt_ids)
    return engine.requests[1].params


def test_greedy_by_default(tokenizer):
    params = submitted(tokenizer, GenerationConfig())
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 0, 1.0, 0.0)
    assert params.stop_ids == (tokenizer.eos_id,)
    assert params.max_drafts is None


def test_sampling_settings(tokenizer):
    config = GenerationConfig(do_sample=True, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, random_seed=-1)
    params = submitted(tokenizer, config)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 7, 0.9, 0.1)
    assert params.seed == 2**64 - 1
    assert submitted(tokenizer, GenerationConfig(do_sample=True, top_k=1000)).top_k == 0
    assert submitted(tokenizer, GenerationConfig(do_sample=True, temperature=1e-6)).temperature == 0.0


def test_seed_is_drawn_and_returned(tokenizer):
    seeds = {fold(collect(FakeEngine(lambda _: [[10]]), tokenizer)).seed for _ in range(3)}
    assert len(seeds) == 3
    assert fold(collect(FakeEngine(lambda _: [[10]]), tokenizer, GenerationConfig(random_seed=2**64 + 5))).seed == 5


def test_limits(tokenizer):
    assert submitted(tokenizer, LONG, session_len=10).max_new_tokens == 7
    params = submitted(tokenizer, GenerationConfig(max_new_tokens=100, min_new_tokens=50), session_len=10)
    assert (params.max_new_tokens, params.min_new_tokens) == (7, 7)


def test_eos_ids_and_own_stop_ids(tokenizer):
    eos_ids = (5, tokenizer.eos_id, 2000)
    params = submitted(tokenizer, GenerationConfig(stop_token_ids=[7, 5]), eos_ids=eos_ids)
    assert (params.stop_ids, params.banned_ids) == ((5, tokenizer.eos_id, 7), ())
    params = submitted(tokenizer, GenerationConfig(stop_token_ids=[7, 5], ignore_eos=True), eos_ids=eos_ids)
    assert (params.stop_ids, params.banned_ids) == ((7, 5), (tokenizer.eos_id,))


def test_drafts_can_be_capped(tokenizer):
    assert submitted(tokenizer, GenerationConfig(speculative=False, num_speculative_tokens=2)).max_drafts == 0
    assert submitted(tokenizer, GenerationConfig(num_speculative_tokens=2)).max_drafts == 2
    assert submitted(tokenizer, GenerationConfig(num_speculative_tokens=9)).max_drafts == 3


@pytest.mark.parametrize(
    ('prompt_ids', 'config', 'code', 'text'),
    [
        ((), {}, 'empty_prompt', 'at least one token'),
        ((1,) * 256, {}, 'context_length_exceeded', 'session_len=256'),
        ((1, 1000), {}, 'invalid_value', r'prompt=1000: token ids of this model lie in \[0, 1000\)'),
        ((1, -1), {}, 'invalid_value', 'prompt=-1'),
        ((1,), {'stop_token_ids': [1, 1000]}, 'invalid_value', 'stop_token_ids=1000'),
        ((1,), {'stop_token_ids': list(range(64))}, 'invalid_value', 'at most 64 stop ids'),
    ],
)
def test_what_only_the_model_can_refuse(tokenizer, prompt_ids, config, code, text):
    with pytest.raises(RequestError, match=text) as raised:
        collect(FakeEngine(endless), tokenizer, GenerationConfig(**config), prompt_ids)
    assert raised.value.code == code


def test_too_many_forbidden_tokens_say_where_they_come_from(tokenizer):
    words = ['a', 'b', 'c']
    ids = [i for i in range(300) if tokenizer.token_text(i) not in {*words, *(f' {word}' for word in words)}][:254]
    with pytest.raises(RequestError, match=r'at most 256 in all; \d of bad_words.* 254 of bad_token_ids') as raised:
        collect(FakeEngine(endless), tokenizer, GenerationConfig(bad_token_ids=ids, bad_words=words))
    assert raised.value.field == 'bad_words'


def test_bad_words_that_the_model_cannot_emit(tokenizer):
    info = dataclasses.replace(DEFAULT_INFO, vocab_size=300)
    word = next(w for w in ('<think>', '</think>', '<tool_call>') if tokenizer.token_id(w) >= 300)
    with pytest.raises(RequestError, match=r'bad_words=.*cannot emit'):
        collect(FakeEngine(endless, info), tokenizer, GenerationConfig(bad_words=[f'a{word}']))


def test_idle_sampling_fields_warn_once(tokenizer, caplog):
    async def body(async_engine):
        for config in (GenerationConfig(), GenerationConfig(temperature=0, top_k=1), GenerationConfig(top_p=0.5)):
            async_engine.make(PROMPT, config)
        async_engine.make(PROMPT, GenerationConfig(temperature=0.3))

    with caplog.at_level(logging.WARNING, 'specdec'):
        run(FakeEngine(endless), tokenizer, body)
    assert [record.getMessage() for record in caplog.records] == [
        'without effect, because do_sample=False decodes greedily: top_p'
    ]


def test_defaults_serve_requests_without_settings(tokenizer):
    engine = FakeEngine(lambda _: [[10]])

    async def body(async_engine):
        return [piece async for piece in async_engine.generate(PROMPT)]

    run(engine, tokenizer, body, GenerationConfig(do_sample=True, temperature=0.25))
    assert engine.requests[1].params.temperature == 0.25
