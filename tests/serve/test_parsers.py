"""Reasoning and tool calls: the parts of a text do not depend on the pieces it arrives in."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import ConfigError
from specdec.serve.parsers.answer_parser import AnswerParser, ParserFactory, opens_reasoning
from specdec.serve.parsers.reasoning import NoReasoning, ReasoningTokens, ThinkTags
from specdec.serve.parsers.tools import JsonCall, NoTools, TagCall, TaggedTools

TOOLS = [
    {
        'type': 'function',
        'function': {
            'name': 'find',
            'parameters': {
                'type': 'object',
                'properties': {
                    'what': {'type': 'string'}, 'count': {'type': 'integer'}, 'deep': {'type': ['object', 'null']},
                    'now': {'type': 'boolean'},
                },
            },
        },
    }
]  # fmt: skip
CALL = '<tool_call>\n{"name": "find", "arguments": {"what": "a } \\" {", "deep": {"x": [1, {"y": 2}]}}}\n</tool_call>'
ARGUMENTS = {'what': 'a } " {', 'deep': {'x': [1, {'y': 2}]}}


def parts_of(parser: AnswerParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, [(name, arguments)]) of pieces pushed one after the other."""
    reasoning, content, calls = '', '', []
    for number, piece in enumerate(pieces, 1):
        parts = parser.push(piece, last=number == len(pieces))
        reasoning += parts.reasoning
        content += parts.content
        for delta in parts.calls:
            if delta.name is not None:
                assert delta.index == len(calls)
                calls.append((delta.name, ''))
            calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.arguments)
    return reasoning, content, calls


def make(reasoning: bool = False, tools: type | None = None, inside: bool = False) -> AnswerParser:
    return AnswerParser(
        ThinkTags(inside) if reasoning else NoReasoning(), TaggedTools(TOOLS, tools) if tools else NoTools()
    )


def in_pieces(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)] or ['']


@pytest.mark.parametrize(
    ('text', 'inside', 'reasoning', 'content'),
    [
        ('<think>\nwhy\n</think>\n\nso', False, 'why', 'so'),
        ('\n <think>why</think>so', False, 'why', 'so'),
        ('why\n\nbecause\n</think>\n\nso ', True, 'why\n\nbecause', 'so '),
        ('<think>\n\n</think>\n\nso', False, '', 'so'),
        ('no tags at all', False, '', 'no tags at all'),
        ('  no tags', False, '', '  no tags'),
        ('a <think>b</think> c', False, '', 'a <think>b</think> c'),
        ('<thin', False, '', '<thin'),
        ('<think>cut off </thi', False, 'cut off </thi', ''),
        ('cut off', True, 'cut off', ''),
        ('a < b </ c </think>x</think>', True, 'a < b </ c', 'x</think>'),
        ('<think>one</think>', False, 'one', ''),
        ('', False, '', ''),
    ],
)
@pytest.mark.parametrize('size', [1, 2, 3, 5, 8, 100])
def test_reasoning(text, inside, reasoning, content, size):
    assert parts_of(make(True, inside=inside), in_pieces(text, size)) == (reasoning, content, [])


@pytest.mark.parametrize(
    ('text', 'content', 'calls'),
    [
        (CALL, '', [('find', ARGUMENTS)]),
        (f'Let me see.\n{CALL}\n', 'Let me see.', [('find', ARGUMENTS)]),
        (f'{CALL}{CALL}', '', [('find', ARGUMENTS)] * 2),
        (f'{CALL}\n{CALL}\nDone.', '\n\nDone.', [('find', ARGUMENTS)] * 2),
        ('<tool_call>{"name":"f","arguments":{}}</tool_call>', '', [('f', {})]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', '', [('f', {'a': 1})]),
        ('<tool_call>{"name": "f", "parameters": {"a": "é\\n"}}</tool_call>', '', [('f', {'a': 'é\n'})]),
        ('<tool_call>{"name": "f"}</tool_call>', '', [('f', {})]),
        ('<tool_call>\nno call\n</tool_call> x', '<tool_call>\nno call\n</tool_call> x', []),
        ('<tool_call>{"nam', '<tool_call>{"nam', []),
        ('a <tool_cal', 'a <tool_cal', []),
        ('no call  ', 'no call  ', []),
        ('</tool_call>', '</tool_call>', []),
    ],
)
@pytest.mark.parametrize('size', [1, 2, 3, 7, 100])
def test_json_calls(text, content, calls, size):
    reasoning, found, found_calls = parts_of(make(tools=JsonCall), in_pieces(text, size))
    assert (reasoning, found) == ('', content)
    assert [(name, json.loads(arguments)) for name, arguments in found_calls] == calls


def test_arguments_stream_before_the_call_ends():
    parser = make(tools=JsonCall)
    parts = [parser.push(piece) for piece in in_pieces('<tool_call>{"name": "f", "arguments": {"text": "a long one', 1)]
    assert sum(bool(part.calls) for part in parts) > 10


def test_a_call_cut_off_keeps_what_it_had():
    parser = make(tools=JsonCall)
    _, content, calls = parts_of(parser, in_pieces('<tool_call>{"name": "f", "arguments": {"a": "b', 3))
    assert (content, calls) == ('', [('f', '{"a": "b')])


@pytest.mark.parametrize(
    ('text', 'content', 'calls'),
    [
        (
            'Yes.\n<tool_call>\n<function=find>\n<parameter=what>\ntwo\nlines\n</parameter>\n<parameter=count>\n12\n'
            '</parameter>\n<parameter=deep>\n{"a": [1]}\n</parameter>\n<parameter=now>\nTrue\n</parameter>\n'
            '</function>\n</tool_call>',
            'Yes.',
            [('find', {'what': 'two\nlines', 'count': 12, 'deep': {'a': [1]}, 'now': True})],
        ),
        ('<tool_call><function=g></function></tool_call>', '', [('g', {})]),
        (
            '<tool_call>\n<function=find>\n<parameter=count>\nmany\n</parameter>\n<parameter=what>\n7\n</parameter>\n'
            '</function>\n</tool_call>',
            '',
            [('find', {'count': 'many', 'what': '7'})],
        ),
        ('<tool_call>what?</tool_call>', '<tool_call>what?</tool_call>', []),
    ],
)
@pytest.mark.parametrize('size', [1, 4, 100])
def test_tagged_calls(text, content, calls, size):
    _, found, found_calls = parts_of(make(tools=TagCall), in_pieces(text, size))
    assert found == content
    assert [(name, json.loads(arguments)) for name, arguments in found_calls] == calls


WORDS = [
    '<think>', '</think>', '<tool_call>', '</tool_call>', '{"name": "f", "arguments": ', '{"a": 1}', '}', ' ', '\n',
    'x', '<', '</', '"', '你好', '{"name"', '<function=g>', '<parameter=p>', '</parameter>', '</function>', '\\',
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(WORDS), max_size=14),
    st.integers(0, 2**32),
    st.booleans(),
    st.sampled_from([JsonCall, TagCall]),
)
def test_pieces_do_not_matter(words, seed, inside, body):
    text = ''.join(words)
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 6))))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)])]
    whole = parts_of(make(True, body, inside), [text])
    assert parts_of(make(True, body, inside), pieces) == whole
    assert parts_of(make(True, body, inside), in_pieces(text, 1)) == whole


@pytest.mark.parametrize(
    ('tokens', 'inside', 'count'),
    [
        (['<think>', 'a', ' b', '</think>', 'c'], False, 4),
        (['\n', '<th', 'ink>a', 'b</', 'think>c', 'd'], False, 5),
        (['a', '</think>', 'b'], True, 2),
        (['a', 'b'], False, 0),
        (['<think>', 'a'], False, 2),
        (['<think></think>', 'a'], False, 1),
        ([], True, 0),
    ],
)
def test_reasoning_tokens(tokens, inside, count):
    for size in (1, 2, 10):
        counter = ReasoningTokens(inside)
        for i in range(0, len(tokens), size):
            counter.push(tokens[i : i + size])
        assert counter.count == count


def test_the_prompt_may_open_the_section():
    assert opens_reasoning('<|im_start|>assistant\n<think>\n')
    assert not opens_reasoning('<|im_start|>assistant\n<think>\n\n</think>\n\n')
    assert not opens_reasoning('<|im_start|>assistant\n')


def test_factory():
    assert ParserFactory().parser('', TOOLS) is None
    assert ParserFactory(tools='qwen').parser('', None) is None
    assert ParserFactory(reasoning='default').parser('', None) is not None
    for names in ({'reasoning': 'deepseek-v3'}, {'tools': 'llama3'}):
        with pytest.raises(ConfigError, match='not served here'):
            ParserFactory(**names)
