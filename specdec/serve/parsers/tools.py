"""Tool calls as Qwen's models write them, JSON or tags, turned into OpenAI's while they stream.

Every parser gives the same calls for the same text, whatever the pieces. What looks like a call and turns out to be
none is given out as content. Next: answer_parser.py.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Protocol

from specdec.serve.parsers.marks import split_at
from specdec.serve.text import dumps

BEGIN, END = '<tool_call>', '</tool_call>'


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """News of call number `index`: its `name` comes first and once, `arguments` (JSON text) in pieces."""

    index: int
    name: str | None = None
    arguments: str = ''


Pieces = tuple[str, list[ToolDelta]]  # new content, news of calls


class ToolParser(Protocol):
    num_calls: int

    def push(self, text: str) -> Pieces: ...

    def flush(self) -> Pieces: ...


class NoTools:
    """Everything is content."""

    num_calls = 0

    def push(self, text: str) -> Pieces:
        return text, []

    def flush(self) -> Pieces:
        return '', []


class CallBody(Protocol):
    """What stands between <tool_call> and </tool_call>."""

    def push(self, text: str) -> tuple[str | None, str]:
        """(the name, once it is known and only then; new argument text)"""

    def finish(self) -> tuple[str | None, str] | None:
        """The same for the end of the call; None if it was none, which may only be said before a name was given."""


class TaggedTools:
    """Calls between <tool_call> and </tool_call>; white space around them belongs to no content."""

    def __init__(self, tools: list[dict[str, Any]], body: type['JsonCall'] | type['TagCall']) -> None:
        self.num_calls = 0
        self._tools, self._body = tools, body
        self._held = ''
        self._gap = ''  # white space that is content only if more content follows
        self._call: CallBody | None = None
        self._call_text = ''
        self._named = False

    def push(self, text: str) -> Pieces:
        self._held += text
        content: list[str] = []
        deltas: list[ToolDelta] = []
        while True:
            if self._call is None:
                before, after = split_at(self._held, BEGIN)
                content.append(self._spaced(before))
                if after is None:
                    self._held = self._held[len(before) :]
                    return ''.join(content), deltas
                self._held, self._call, self._call_text, self._named = after, self._body(self._tools), '', False
            inside, rest = split_at(self._held, END)
            deltas += self._in_call(*self._call.push(inside))
            self._call_text += inside
            if rest is None:
                self._held = self._held[len(inside) :]
                return ''.join(content), deltas
            self._held = rest
            content += self._end_call(END, deltas)

    def flush(self) -> Pieces:
        deltas: list[ToolDelta] = []
        if self._call is None:
            text, self._held = self._spaced(self._held), ''
            gap, self._gap = '' if self.num_calls else self._gap, ''
            return text + gap, deltas
        inside, self._held = self._held, ''
        deltas += self._in_call(*self._call.push(inside))
        self._call_text += inside
        return ''.join(self._end_call('', deltas)), deltas

    def _in_call(self, name: str | None, arguments: str) -> list[ToolDelta]:
        if name is not None:
            self._named = True
            self.num_calls += 1
            return [ToolDelta(self.num_calls - 1, name, arguments)]
        return [ToolDelta(self.num_calls - 1, None, arguments)] if arguments else []

    def _end_call(self, mark: str, deltas: list[ToolDelta]) -> list[str]:
        """What is content after all: the call's own text, if it was none."""
        ending = self._call.finish()
        self._call = None
        if ending is not None:
            deltas += self._in_call(*ending)
            return []
        return [self._spaced(BEGIN + self._call_text + mark)]

    def _spaced(self, text: str) -> str:
        """`text` with the white space before it; the white space at its end waits for what follows."""
        body = text.rstrip()
        if not body:
            self._gap += text
            return ''
        shown, self._gap = self._gap + body, text[len(body) :]
        return shown


class JsonCall:
    """{"name": ..., "arguments": {...}}: the arguments' text is passed on as it comes, once the name is known."""

    _HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')

    def __init__(self, _tools: list[dict[str, Any]]) -> None:
        self._text = ''
        self._named = False
        self._depth = 0
        self._in_string = self._escaped = self._done = False

    def push(self, text: str) -> tuple[str | None, str]:
        if self._named:
            return None, self._value(text)
        self._text += text
        match = self._HEAD.match(self._text)
        if match is None:
            return None, ''
        try:
            name = json.loads(match[1])
        except ValueError:
            return None, ''
        self._named = True
        return name, self._value(self._text[match.end() :])

    def finish(self) -> tuple[str | None, str] | None:
        if self._named:
            return None, ''
        try:
            call = json.loads(self._text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or not isinstance(call.get('name'), str):
            return None
        arguments = call.get('arguments', call.get('parameters', {}))
        return call['name'], arguments if isinstance(arguments, str) else dumps(arguments)

    def _value(self, text: str) -> str:
        """The part of `text` that belongs to the arguments' object."""
        for index, character in enumerate(text):
            if self._done:
                return text[:index]
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == '\\'
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in '{[':
                self._depth += 1
            elif character in '}]':
                self._depth -= 1
                self._done = self._depth == 0
        return text


class TagCall:
    """<function=NAME><parameter=KEY>value</parameter>...</function>: values are typed by the tool's schema."""

    _FUNCTION = re.compile(r'\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*\Z', re.S)
    _PARAMETER = re.compile(r'<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)', re.S)

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        self._tools = tools
        self._text = ''

    def push(self, text: str) -> tuple[str | None, str]:
        self._text += text
        return None, ''

    def finish(self) -> tuple[str | None, str] | None:
        match = self._FUNCTION.match(self._text)
        if match is None:
            return None
        name = match[1].strip()
        types = _parameter_types(self._tools, name)
        values = {key.strip(): value for key, value in self._PARAMETER.findall(match[2])}
        arguments = {key: _typed(_without_frame(value), types.get(key)) for key, value in values.items()}
        return name, dumps(arguments)


def _parameter_types(tools: list[dict[str, Any]], name: str) -> dict[str, Any]:
    for tool in tools:
        function = tool.get('function', tool)
        if isinstance(function, dict) and function.get('name') == name:
            parameters = function.get('parameters') or {}
            properties = parameters.get('properties') if isinstance(parameters, dict) else None
            if isinstance(properties, dict):
                return {key: schema.get('type') for key, schema in properties.items() if isinstance(schema, dict)}
    return {}


def _without_frame(value: str) -> str:
    """The template puts a line break before and after each value."""
    return value.removeprefix('\n').removesuffix('\n')


def _typed(value: str, kind: Any) -> Any:
    """Text for a string, JSON for what the schema calls something else, text again where it is no JSON."""
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is None or 'string' in kinds:
        return value
    try:
        return json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return {'True': True, 'False': False, 'None': None}.get(value, value)


def _no_constant(name: str) -> None:
    raise ValueError(name)


TOOL_BODIES: dict[str, type[JsonCall] | type[TagCall]] = {
    'qwen': JsonCall,
    'qwen2d5': JsonCall,
    'qwen3': JsonCall,
    'qwen3coder': TagCall,
}
