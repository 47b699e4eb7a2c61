"""What a format may ask for: keywords that its grammar really enforces, and no more than can be compiled in seconds.

A JSON schema that says more than a grammar can is refused by name; an answer would else break it without a word. Next:
grammar.py, which compiles what has passed.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from specdec.errors import RequestError

MAX_REPETITIONS = 4096  # sum of all bounds that a grammar has to count up to
MAX_DEPTH = 64

ANNOTATIONS = frozenset(
    ('title', 'description', 'default', 'examples', 'example', '$schema', '$id', '$comment', 'deprecated', 'readOnly',
     'writeOnly', 'discriminator', '$defs', 'definitions', 'strict')
)  # fmt: skip
ENFORCED = frozenset(
    ('type', 'properties', 'required', 'additionalProperties', 'patternProperties', 'propertyNames', 'minProperties',
     'maxProperties', 'items', 'prefixItems', 'minItems', 'maxItems', 'enum', 'const', 'anyOf', 'oneOf', 'allOf',
     '$ref', 'minLength', 'maxLength', 'pattern', 'format', 'minimum', 'maximum', 'exclusiveMinimum',
     'exclusiveMaximum')
)  # fmt: skip
COUNTS = ('minLength', 'maxLength', 'minItems', 'maxItems', 'minProperties', 'maxProperties')


def check_format(response_format: Mapping[str, Any]) -> None:
    """RequestError for a format with a schema that cannot be enforced, or with more to count than can be compiled."""
    count = 0
    for kind, value in _parts(response_format, 0):
        count += check_schema(value, 'response_format') if kind == 'schema' else repetitions(value)
    _check_count(count, 'response_format')


def check_schema(schema: Any, field: str) -> int:
    """Repetitions that the schema asks for. RequestError names the first keyword that would be ignored."""
    count = 0
    for part in _subschemas(schema, field, 0):
        _check_keywords(part, field)
        count += sum(part[name] for name in COUNTS if isinstance(part.get(name), int))
        count += sum(map(repetitions, [part['pattern']] if isinstance(part.get('pattern'), str) else []))
    _check_count(count, field)
    return count


def _check_count(count: int, field: str) -> None:
    if count > MAX_REPETITIONS:
        remedy = f'at most {MAX_REPETITIONS} in all of maxLength, maxItems, {{m,n}} and the like; lower some'
        raise RequestError(field, f'{count} repetitions', remedy)


def _parts(node: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """('schema', ...) and ('pattern', ...) of a format, however deep a structural tag has them."""
    if depth > MAX_DEPTH:
        raise RequestError('response_format', '...', f'is nested deeper than {MAX_DEPTH}')
    if isinstance(node, list):
        for one in node:
            yield from _parts(one, depth + 1)
    if not isinstance(node, Mapping):
        return
    for name, value in node.items():
        if name in ('json_schema', 'schema'):
            inner = value.get('schema') if isinstance(value, Mapping) and name == 'json_schema' else None
            yield 'schema', inner if isinstance(inner, Mapping) else value
        elif name in ('regex', 'regex_schema', 'pattern', 'ebnf', 'grammar') and isinstance(value, str):
            yield 'pattern', value
        elif isinstance(value, (Mapping, list)):
            yield from _parts(value, depth + 1)


def _subschemas(schema: Any, field: str, depth: int) -> Iterator[Mapping[str, Any]]:
    if depth > MAX_DEPTH:
        raise RequestError(field, '...', f'is nested deeper than {MAX_DEPTH}')
    if not isinstance(schema, Mapping):
        return
    yield schema
    inner: list[Any] = []
    for name in ('properties', 'patternProperties', '$defs', 'definitions'):
        inner += list(schema[name].values()) if isinstance(schema.get(name), Mapping) else []
    for name in ('anyOf', 'oneOf', 'allOf', 'prefixItems'):
        inner += schema[name] if isinstance(schema.get(name), list) else []
    for name in ('items', 'additionalProperties', 'propertyNames'):
        inner.append(schema.get(name))
    for one in inner:
        yield from _subschemas(one, field, depth + 1)


def _check_keywords(schema: Mapping[str, Any], field: str) -> None:
    def refuse(name: str, why: str) -> None:
        raise RequestError(field, {name: schema[name]}, f'{name} {why}')

    said = {name for name in schema if name not in ANNOTATIONS}
    for name in sorted(said - ENFORCED):
        if schema[name] is not False and not name.startswith('x-'):
            refuse(name, 'is not enforced by a grammar; leave it out')
    if '$ref' in schema and not str(schema['$ref']).startswith('#'):
        refuse('$ref', 'must point into the same schema (#/...)')
    if len(schema.get('allOf') or ()) > 1:
        refuse('allOf', 'of several schemas is not enforced by a grammar; merge them into one')
    for name in ('$ref', 'anyOf', 'oneOf', 'allOf'):
        beside = said - {name, 'type'}
        if name in said and beside:
            refuse(name, f'would hide {", ".join(sorted(beside))} beside it; put them inside')
    if ('pattern' in said or 'format' in said) and said & {'minLength', 'maxLength'}:
        name = 'pattern' if 'pattern' in said else 'format'
        refuse(name, 'would hide minLength and maxLength; bound it in a pattern')
    for name in ('enum', 'const'):
        beside = said - {name, 'type'}
        if name in said and beside:
            refuse(name, f'would hide {", ".join(sorted(beside))} beside it; leave them out')
    branches = schema.get('oneOf')
    if isinstance(branches, list) and not _disjoint(branches):
        refuse('oneOf', 'needs branches that cannot both hold (types, or a required property with another const); '
               'use anyOf')  # fmt: skip


def _disjoint(branches: list[Any]) -> bool:
    return all(_apart(one, other) for i, one in enumerate(branches) for other in branches[:i])


def _apart(one: Any, other: Any) -> bool:
    """Evidently no value fits both."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    mine, theirs = _values(one), _values(other)
    if mine is not None and theirs is not None:
        return not any(value in theirs for value in mine)
    types = one.get('type'), other.get('type')
    if all(isinstance(kind, str) for kind in types) and types[0] != types[1]:
        return set(types) != {'integer', 'number'}
    if types != ('object', 'object'):
        return False
    shared = set(one.get('required') or ()) & set(other.get('required') or ())
    places = one.get('properties') or {}, other.get('properties') or {}
    return any(_apart(places[0].get(name), places[1].get(name)) for name in shared)


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    if 'const' in schema:
        return [schema['const']]
    return schema.get('enum') if isinstance(schema.get('enum'), list) else None


def repetitions(pattern: str) -> int:
    """How far the counted repetitions {m,n} of a pattern count, those inside of others multiplied."""
    sums, last, position = [0], 1, 0
    while position < len(pattern):
        character = pattern[position]
        if character == '\\':
            position, last = position + 2, 1
            continue
        if character == '[':
            end = re.compile(r'\[\^?\]?(?:\\.|[^\]\\])*\]').match(pattern, position)
            position, last = end.end() if end else position + 1, 1
            continue
        counted = re.compile(r'\{(\d+)(?:,(\d*))?\}').match(pattern, position)
        if counted:
            sums[-1] += max(last, 1) * int(counted.group(2) or counted.group(1))
            position, last = counted.end(), 1
            continue
        if character == '(':
            sums.append(0)
        elif character == ')' and len(sums) > 1:
            last = sums.pop()
            sums[-1] += last
            position += 1
            continue
        position, last = position + 1, 1
    return sum(sums)
