"""Structured output on the demo's models: every answer follows its grammar, and is the same with drafts as without."""

import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip('xgrammar')

from specdec import GenerationConfig, Pipeline, PytorchEngineConfig, SpeculativeConfig
from specdec.agent.state import mask_words
from specdec.engine.build import build_engine
from specdec.engine.engine import Engine
from specdec.engine.grammar import GrammarCompiler, GrammarGuides, tools_format
from specdec.engine.grammar_limits import repetitions
from specdec.engine.live_request import RequestMaker
from specdec.engine.tokenizer import Tokenizer
from specdec.engine.wire import decode, encode
from specdec.errors import RequestError
from specdec.messages import EngineRequest, SamplingParams
from specdec.plan import Admit
from tests.helpers.emulated_gpu import as_on_a_gpu
from tests.helpers.engines import Outcome, drive, generate, request

METHODS = [None, 'dflash', 'dspark']
PERSON = {
    'type': 'object',
    'properties': {
        'name': {'type': 'string', 'maxLength': 12},
        'kind': {'enum': ['cat', 'dog', 'día', '猫']},
        'tags': {'type': 'array', 'items': {'type': 'integer', 'minimum': 0, 'maximum': 99}, 'maxItems': 3},
        'home': {'type': 'object', 'properties': {'open': {'type': 'boolean'}}, 'required': ['open']},
    },
    'required': ['name', 'kind', 'tags', 'home'],
}
FORMATS: dict[str, dict[str, Any]] = {
    'json_object': {'type': 'json_object'},
    'json_schema': {'type': 'json_schema', 'json_schema': {'name': 'person', 'schema': PERSON}},
    'bare schema': {'type': 'json_schema', 'json_schema': PERSON},
    'regex': {'type': 'regex', 'regex': r'[a-z]{3,8}-\d{2}'},
    'regex_schema': {'type': 'regex_schema', 'regex_schema': r'(yes|no)!'},
    'ebnf': {'type': 'ebnf', 'ebnf': 'root ::= "go " ("left" | "right") (", " root)?'},
    'choice': {'type': 'choice', 'choice': ['red', 'green', 'blue "or" so']},
    'structural_tag': {
        'type': 'structural_tag',
        'format': {'type': 'tag', 'begin': '<a>', 'content': {'type': 'regex', 'pattern': r'\d+'}, 'end': '</a>'},
    },
}
PROMPT = 'def read(self, size):\n'


@pytest.fixture(scope='module')
def engines() -> dict[str | None, Engine]:
    return {
        method: build_engine(
            'demo', PytorchEngineConfig(device_type='cpu', block_size=16, session_len=256),
            None if method is None else SpeculativeConfig(method),
        )
        for method in METHODS
    }  # fmt: skip


@pytest.fixture(scope='module')
def tokenizer(engines: dict[str | None, Engine]) -> Tokenizer:
    return Tokenizer.load(engines[None].info.folder)


@pytest.fixture(scope='module')
def compiler(engines: dict[str | None, Engine], tokenizer: Tokenizer) -> GrammarCompiler:
    info = engines[None].info
    compiler = GrammarCompiler(tokenizer, info.vocab_size, info.eos_ids)
    compiler.compile(FORMATS['json_object'])
    assert compiler.vocabulary is not None
    for engine in engines.values():
        engine.set_vocabulary(compiler.vocabulary)
    return compiler


def asked(engine: Engine, tokenizer: Tokenizer, grammar: str | None, new: int = 60, **params: Any) -> EngineRequest:
    settings = {'stop_ids': engine.info.eos_ids, 'temperature': 1.0, 'draft_sampling': 'coupled', 'seed': 5} | params
    return request(tokenizer.encode(PROMPT), new, grammar=grammar, **settings)


def text_of(outcome: Outcome, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(outcome.token_ids)


def follows(text: str, name: str) -> bool:
    if 'regex' in name:
        return re.fullmatch(FORMATS[name][name], text) is not None
    if name == 'ebnf':
        return re.fullmatch(r'go (left|right)(, go (left|right))*', text) is not None
    if name == 'choice':
        return text in FORMATS[name]['choice']
    if name == 'structural_tag':
        return re.fullmatch(r'<a>\d+</a>', text) is not None
    value = json.loads(text)
    if name == 'json_object':
        return isinstance(value, dict)
    return (
        set(value) == set(PERSON['required']) and len(value['name']) <= 12 and isinstance(value['home']['open'], bool)
    )


@pytest.mark.parametrize('name', FORMATS)
def test_every_format_with_and_without_drafts(
    engines: dict[str | None, Engine], tokenizer: Tokenizer, compiler: GrammarCompiler, name: str
) -> None:
    """Greedy and sampled requests, with a neighbour that has no grammar."""
    grammar = compiler.compile(FORMATS[name])
    texts = {}
    for method, engine in engines.items():
        kinds = [{'seed': seed} for seed in range(3)] + [{'temperature': 0.0}]
        requests = [asked(engine, tokenizer, grammar, 150, **kind) for kind in kinds]
        outcomes = generate(engine, [*requests, asked(engine, tokenizer, None, 20)])
        texts[method] = [outcome.token_ids for outcome in outcomes]
        for outcome in outcomes[:-1]:
            assert outcome.finish in ('stop', 'length')
            if outcome.finish == 'stop':
                assert follows(text_of(outcome, tokenizer), name)
    assert texts['dflash'] == texts[None]
    assert texts['dspark'] == texts[None]


@pytest.mark.parametrize('method', ['dflash', 'dspark'])
def test_preempted_and_as_on_a_gpu(
    engines: dict[str | None, Engine], tokenizer: Tokenizer, compiler: GrammarCompiler, method: str
) -> None:
    """The guide follows its request out of its slot and back, and one step behind the device."""
    grammar = compiler.compile(FORMATS['json_schema'])
    engine = engines[method]
    expected = [
        outcome.token_ids
        for outcome in generate(engines[None], [asked(engine, tokenizer, grammar, 120, seed=i) for i in range(4)])
    ]
    driver, dice = drive(engine), random.Random(1)
    requests = [asked(engine, tokenizer, grammar, 120, seed=i) for i in range(4)]
    for one in requests:
        driver.add(one)
    scheduler = engine.scheduler
    while engine.has_work():
        driver.step()
        if scheduler.running and dice.random() < 0.3:
            scheduler._preempt(dice.choice(scheduler.running))
    assert [driver.outcomes[one.request_id].token_ids for one in requests] == expected
    small = PytorchEngineConfig(device_type='cpu', block_size=16, session_len=256, max_batch_size=3)
    fresh = build_engine('demo', small, SpeculativeConfig(method))
    fresh.set_vocabulary(compiler.vocabulary)
    requests = [asked(engine, tokenizer, grammar, 120, seed=i) for i in range(4)]
    found = generate(as_on_a_gpu(fresh), requests, arrivals=[0, 1, 2, 6])
    assert [outcome.token_ids for outcome in found] == expected
    assert fresh.agent.graphs.replays > 10


# -------------------------------------------------------------------------------------------------------- one guide
def guide_for(compiler: GrammarCompiler, name: str, vocabulary: int, **params: Any) -> Any:
    guides = GrammarGuides(vocabulary)
    guides.set_vocabulary(compiler.vocabulary.data)
    settings = {'prompt_ids': (1, 2), 'output_ids': params.pop('output_ids', ())}
    sampling = SamplingParams(50, grammar=compiler.compile(FORMATS[name]), **params)
    return guides.make(Admit(1, 0, 60, 2, sampling, **settings))


def allowed(mask: torch.Tensor) -> list[int]:
    bits = (mask[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return torch.nonzero(bits.flatten()).flatten().tolist()


def test_a_guide_walks_drafts_and_comes_back(
    engines: dict[str | None, Engine], tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    vocabulary = engines[None].info.vocab_size
    words = tokenizer.encode('red')
    full = list(range(vocabulary))
    for wrong in range(len(words) + 1):  # the draft that the grammar forbids, at each position
        guide = guide_for(compiler, 'choice', vocabulary, stop_ids=engines[None].info.eos_ids)
        drafts = [*words[:wrong], tokenizer.encode('!')[0], *words[wrong:]]
        masks = torch.full((len(drafts) + 1, vocabulary // 32), -1, dtype=torch.int32)
        guide.fill(drafts, masks)
        for step in range(len(drafts) + 1):
            replayed = guide_for(compiler, 'choice', vocabulary, stop_ids=engines[None].info.eos_ids)
            if step <= wrong:
                replayed.advance(words[:step])
                expected = torch.full((1, vocabulary // 32), -1, dtype=torch.int32)
                replayed.fill([], expected)
                assert allowed(masks[step]) == allowed(expected[0]) != full
            else:
                assert allowed(masks[step]) == full
        again = masks.clone().fill_(-1)
        guide.fill(drafts, again)
        assert torch.equal(again, masks)


def test_the_end_inside_a_block(
    engines: dict[str | None, Engine], tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    """The stop token may be drafted; nothing is asked of the grammar behind it."""
    info = engines[None].info
    guide = guide_for(compiler, 'choice', info.vocab_size, stop_ids=info.eos_ids)
    drafts = [*tokenizer.encode('red'), info.eos_ids[0], 5, 6]
    masks = torch.full((len(drafts) + 1, info.vocab_size // 32), -1, dtype=torch.int32)
    guide.fill(drafts, masks)
    assert allowed(masks[len(drafts) - 3]) == sorted(info.eos_ids)
    guide.advance(drafts[:-2])


def test_a_minimum_gives_way_and_allowed_ids_narrow(
    engines: dict[str | None, Engine], tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    info = engines[None].info
    red = tokenizer.encode('red')
    settings = {'stop_ids': info.eos_ids, 'min_new_tokens': 40}
    guide = guide_for(compiler, 'choice', info.vocab_size, output_ids=tuple(red), **settings)
    mask = torch.full((1, info.vocab_size // 32), -1, dtype=torch.int32)
    guide.fill([], mask)
    assert allowed(mask[0]) == sorted(info.eos_ids)
    guide = guide_for(compiler, 'choice', info.vocab_size, allowed_ids=(red[0], 7), **settings)
    guide.fill([], mask.fill_(-1))
    assert allowed(mask[0]) == [red[0]]


def test_masks_of_ids() -> None:
    for ids in ((0,), (31, 32, 63), (5, 99)):
        assert allowed(mask_words(ids, 100)) == list(ids)


def test_special_tokens_are_no_text(
    engines: dict[str | None, Engine], tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    vocabulary = engines[None].info.vocab_size
    guide = guide_for(compiler, 'json_object', vocabulary)
    guide.advance(tokenizer.encode('{"a'))
    mask = torch.full((1, vocabulary // 32), -1, dtype=torch.int32)
    guide.fill([], mask)
    assert not set(allowed(mask[0])) & tokenizer.special_ids


# ---------------------------------------------------------------------------------------------- with other settings
@pytest.mark.parametrize('method', METHODS)
def test_no_end_is_an_error_that_says_why(
    engines: dict[str | None, Engine], tokenizer: Tokenizer, compiler: GrammarCompiler, method: str | None
) -> None:
    engine = engines[method]
    grammar = compiler.compile(FORMATS['choice'])
    one = asked(engine, tokenizer, grammar, banned_ids=engine.info.eos_ids, stop_ids=())
    engine.add(one)
    outputs = []
    while engine.has_work():
        outputs += [output for output in engine.step() if output.request_id == one.request_id]
    assert outputs[-1].finish_reason == 'error'
    assert 'response_format and bad_words, bad_token_ids or ignore_eos' in outputs[-1].error.message
    assert tokenizer.decode([t for o in outputs for t in o.token_ids]) in FORMATS['choice']['choice']


@pytest.mark.parametrize('budget', [None, 0, 5])
def test_a_grammar_waits_for_the_end_of_reasoning(
    engines: dict[str | None, Engine], tokenizer: Tokenizer, compiler: GrammarCompiler, budget: int | None
) -> None:
    opening, closing = tokenizer.token_id('<think>'), tokenizer.token_id('</think>')
    grammar = compiler.compile(FORMATS['regex'])
    texts = {}
    for method, engine in engines.items():
        base = asked(engine, tokenizer, grammar, 120, think_ids=(opening, closing), thinking_budget=budget,
                     reasoning_open=True, logit_bias=((closing, 4.0),))  # fmt: skip
        requests = [
            replace(base, request_id=base.request_id + 1000 + i, params=replace(base.params, seed=i),
                    prompt_ids=(*base.prompt_ids, opening))
            for i in range(3)
        ]  # fmt: skip
        outcomes = generate(engine, requests)
        texts[method] = [outcome.token_ids for outcome in outcomes]
        for ids, outcome in zip(texts[method], outcomes):
            if closing not in ids:
                assert budget is None
                continue
            end = ids.index(closing)
            assert budget is None or end <= budget
            if outcome.finish == 'stop' and ids[-1] in engine.info.eos_ids:
                assert follows(tokenizer.decode(ids[end + 1 :]), 'regex')
    assert texts['dflash'] == texts['dspark'] == texts[None]


def test_messages_cross_a_process(compiler: GrammarCompiler) -> None:
    assert decode(encode(compiler.vocabulary)) == compiler.vocabulary
    params = SamplingParams(5, grammar=compiler.compile(FORMATS['regex']), logit_bias=((3, 1.5),), bad_words=((1, 2),))
    asked = EngineRequest(7, (1, 2), params, 6)
    assert decode(encode(asked)) == asked


# -------------------------------------------------------------------------------------------------------- bad formats
@pytest.mark.parametrize(
    'wrong',
    [
        {}, {'type': 'xml'}, {'type': 'json_schema'},
        {'type': 'json_schema', 'json_schema': {'schema': {'type': 'thing'}}},
        {'type': 'json_schema', 'json_schema': {'schema': {'$ref': '#/nowhere'}}}, {'type': 'regex', 'regex': '(a'},
        {'type': 'regex', 'regex': ''}, {'type': 'ebnf', 'ebnf': 'root ::= missing'}, {'type': 'choice', 'choice': []},
        {'type': 'choice', 'choice': ['']}, {'type': 'choice', 'choice': [str(i) for i in range(1025)]},
        {'type': 'structural_tag', 'format': {'type': 'nothing'}}, {'type': 'regex', 'regex': 'a' * 70000},
    ],
    ids=lambda x: str(x)[:40],
)  # fmt: skip
def test_bad_formats(compiler: GrammarCompiler, wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.compile(wrong)
    assert caught.value.field == 'response_format'
    assert '\n' not in str(caught.value)
    assert '.cc:' not in str(caught.value)


TOOLS = [
    {'type': 'function', 'function': {'name': name, 'parameters': {
        'type': 'object', 'properties': {'path': {'type': 'string', 'maxLength': 9}}, 'required': ['path']}}}
    for name in ('open_file', 'delete_file')
]  # fmt: skip


@pytest.mark.parametrize('choice', ['required', {'type': 'function', 'function': {'name': 'delete_file'}}])
@pytest.mark.parametrize('parser', ['qwen3', 'qwen3coder'])
def test_tools(
    engines: dict[str | None, Engine], tokenizer: Tokenizer, compiler: GrammarCompiler, parser: str, choice: Any
) -> None:
    grammar = compiler.compile(tools_format(parser, TOOLS, choice))
    engine = engines['dspark']
    [outcome] = generate(engine, [asked(engine, tokenizer, grammar, 150, temperature=0.0)])
    text = tokenizer.decode(outcome.token_ids, skip_special_tokens=False)
    assert text.startswith('<tool_call>')
    assert ('delete_file' in text) or choice == 'required'


def test_tool_choice_that_names_no_tool() -> None:
    with pytest.raises(RequestError, match='tool_choice'):
        tools_format('qwen3', TOOLS, {'type': 'function', 'function': {'name': 'other'}})


# ------------------------------------------------------------------------------------------------------------ many
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize('method', ['dflash', 'dspark'])
def test_250_schemas_each(method: str, record_property: Any) -> None:
    """Nested objects, enums, arrays, unicode, at T = 1: what finishes is valid, at least 95 % finish."""
    dice, schemas = random.Random(method), [_schema(random.Random(i)) for i in range(50)]
    config = PytorchEngineConfig(device_type='cpu', session_len=640)
    with Pipeline('demo', config, speculative_config=SpeculativeConfig(method)) as pipe:
        configs = [
            GenerationConfig(
                max_new_tokens=560, do_sample=True, temperature=1.0, top_k=0, random_seed=i,
                response_format={'type': 'json_schema', 'json_schema': {'schema': schemas[i % 50]}},
            )
            for i in range(250)
        ]  # fmt: skip
        prompts = [f'# example {dice.random()}\n' for _ in configs]
        answers = pipe(prompts, configs, do_preprocess=False)
        free = pipe(prompts[:50], [replace(c, response_format=None, max_new_tokens=60) for c in configs[:50]])
    finished = [(i, answer) for i, answer in enumerate(answers) if answer.finish_reason == 'stop']
    for i, answer in finished:
        _check(json.loads(answer.text), schemas[i % 50])
    assert len(finished) >= 0.95 * len(answers)
    assert {answer.finish_reason for answer in answers} <= {'stop', 'length'}
    for name, some in (('with grammar', answers), ('without', free)):
        steps = sum(a.speculation.steps for a in some)
        record_property(f'{method} mean accepted length {name}', 1 + sum(a.speculation.accepted for a in some) / steps)
        print(method, name, round(1 + sum(a.speculation.accepted for a in some) / steps, 3), len(finished))


def _schema(dice: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ['string', 'integer', 'boolean', 'enum', *(['object', 'array'] if depth < 3 else [])]
    kind = 'object' if depth == 0 else dice.choice(kinds)
    if kind == 'object':
        names = dice.sample(['name', 'größe', '名前', 'id', 'tags', 'ok'], dice.randint(1, 3))
        return {'type': 'object', 'properties': {n: _schema(dice, depth + 1) for n in names}, 'required': names}
    if kind == 'array':
        return {'type': 'array', 'items': _schema(dice, depth + 2), 'minItems': 1, 'maxItems': dice.randint(1, 3)}
    if kind == 'enum':
        return {'enum': dice.sample(['red', 'grün', '青', '1', 'two words'], 3)}
    return {
        'string': {'type': 'string', 'maxLength': 8},
        'integer': {'type': 'integer', 'minimum': 0, 'maximum': 999},
    }.get(kind, {'type': kind})


def _check(value: Any, schema: dict[str, Any]) -> None:
    if 'enum' in schema:
        assert value in schema['enum']
    elif schema['type'] == 'object':
        assert list(value) == schema['required']
        for name, inner in schema['properties'].items():
            _check(value[name], inner)
    elif schema['type'] == 'array':
        assert schema['minItems'] <= len(value) <= schema['maxItems']
        for inner in value:
            _check(inner, schema['items'])
    elif schema['type'] == 'string':
        assert len(value) <= schema['maxLength']
    elif schema['type'] == 'integer':
        assert 0 <= value <= 999
        assert not isinstance(value, bool)
    else:
        assert isinstance(value, bool)


# ------------------------------------------------------------------------------- what a schema says beyond a grammar
def schema(**keywords: Any) -> dict[str, Any]:
    inner = {'type': 'object', 'properties': {'a': keywords}, 'required': ['a']}
    return {'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': inner}}


@pytest.mark.parametrize(
    ('keywords', 'named'),
    [
        ({'type': 'integer', 'multipleOf': 7}, 'multipleOf'),
        ({'not': {'const': 1}}, 'not'),
        ({'type': 'array', 'contains': {'const': 5}}, 'contains'),
        ({'type': 'array', 'items': {'type': 'integer'}, 'uniqueItems': True}, 'uniqueItems'),
        ({'allOf': [{'type': 'integer'}, {'minimum': 50}]}, 'allOf'),
        ({'oneOf': [{'type': 'integer'}, {'type': 'number'}]}, 'oneOf'),
        ({'$ref': 'https://example.com/schema'}, '$ref'),
        ({'if': {'type': 'integer'}, 'then': {'minimum': 5}}, 'if'),
        ({'type': 'string', 'pattern': 'a+', 'maxLength': 3}, 'pattern'),
        ({'anyOf': [{'type': 'integer'}], 'minimum': 3}, 'anyOf'),
    ],
)
def test_keywords_that_a_grammar_does_not_enforce_are_refused(
    compiler: GrammarCompiler, keywords: dict[str, Any], named: str
) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.compile(schema(**keywords))
    assert f'{named} ' in str(caught.value)


@pytest.mark.parametrize(
    'keywords',
    [
        {'oneOf': [{'type': 'integer'}, {'type': 'string', 'maxLength': 3}]},
        {'oneOf': [{'const': 1}, {'const': 2}]},
        {'oneOf': [
            {'type': 'object', 'properties': {'kind': {'const': kind}}, 'required': ['kind']} for kind in ('cat', 'dog')
        ]},
        {'allOf': [{'type': 'integer'}]},
        {'type': 'array', 'uniqueItems': False, 'maxItems': 2, 'items': {'type': 'boolean'}},
        {'type': 'string', 'description': 'a name', 'examples': ['x'], 'maxLength': 5, 'x-order': 3},
    ],
)  # fmt: skip
def test_keywords_that_it_does_enforce(compiler: GrammarCompiler, keywords: dict[str, Any]) -> None:
    assert compiler.compile(schema(**keywords))


@pytest.mark.parametrize(
    'wrong',
    [
        {'type': 'json_schema', 'json_schema': {'type': 'object', 'properties': {
            str(i): {'type': 'string', 'maxLength': 64} for i in range(100)
        }}},
        {'type': 'regex', 'regex': '(a{100}b){100}'},
        {'type': 'regex', 'regex': 'x{1,5000}'},
    ],
)  # fmt: skip
def test_what_would_take_too_long_is_refused(compiler: GrammarCompiler, wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match='repetitions'):
        compiler.compile(wrong)


def test_counted_repetitions() -> None:
    assert [repetitions(p) for p in ('abc', 'a{3}', '(a{2}b){3,5}', r'\{9}', '[{9}]', 'a{2,}')] == [0, 3, 12, 0, 0, 2]


@pytest.mark.parametrize('method', METHODS)
def test_a_minimum_gives_way_to_an_end_that_the_grammar_demands(
    engines: dict[str | None, Engine], tokenizer: Tokenizer, compiler: GrammarCompiler, method: str | None
) -> None:
    engine = engines[method]
    grammar = compiler.compile({'type': 'choice', 'choice': ['red']})
    [outcome] = generate(engine, [asked(engine, tokenizer, grammar, 60, min_new_tokens=30)])
    assert outcome.finish == 'stop'
    assert tokenizer.decode(outcome.token_ids) == 'red'


def test_a_mark_in_somebodys_text_opens_no_reasoning(tokenizer: Tokenizer, engines: dict[str | None, Engine]) -> None:
    opening, closing = tokenizer.token_id('<think>'), tokenizer.token_id('</think>')
    maker = RequestMaker(engines[None].info, tokenizer, lambda _: None)
    text = tokenizer.encode('say something')
    newline = tokenizer.encode('\n')
    for ids, expected in (
        ((*text, opening, *text), False),
        ((*text, opening, *newline), True),
        ((*text, opening), True),
        ((*text, opening, *newline, closing, *newline), False),
        (text, False),
    ):
        assert maker.make(ids, GenerationConfig()).request.params.reasoning_open is expected, ids
