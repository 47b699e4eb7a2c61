"""Messages as bytes, for an engine in another process: dataclasses of plain values, written by marshal, never pickle.

Both ends run the same interpreter and the same code, so fields travel by position. Next: process_client.py, which
sends them.
"""

import dataclasses
import marshal
import typing
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from specdec.messages import (
    AbortRequests,
    EngineFailure,
    EngineInfo,
    EngineReady,
    EngineRequest,
    EngineStats,
    ErrorInfo,
    GrammarVocabulary,
    RequestOutput,
    SamplingParams,
    StatsQuery,
)

MESSAGES = (
    EngineReady, EngineFailure, EngineRequest, AbortRequests, StatsQuery, EngineStats, RequestOutput,
    GrammarVocabulary,
)  # fmt: skip
PARTS = (EngineInfo, SamplingParams, ErrorInfo)  # messages' fields that are dataclasses themselves
_OUTPUTS = len(MESSAGES)  # the code of a list of RequestOutputs, one step's


def encode(message: Any) -> bytes:
    kind = type(message)
    return marshal.dumps((_CODES[kind], _FORMS[kind].pack(message)))


def encode_outputs(outputs: list[RequestOutput]) -> bytes:
    pack = _FORMS[RequestOutput].pack
    return marshal.dumps((_OUTPUTS, [pack(output) for output in outputs]))


def decode(data: bytes) -> Any:
    """The message, or one step's outputs as a list."""
    code, values = marshal.loads(data)
    if code == _OUTPUTS:
        unpack = _FORMS[RequestOutput].unpack
        return [unpack(one) for one in values]
    return _FORMS[MESSAGES[code]].unpack(values)


class _Form:
    """How one dataclass becomes a tuple of its fields, and comes back."""

    __slots__ = ('_get', '_kind', '_nested')

    def __init__(self, kind: type) -> None:
        names = [field.name for field in dataclasses.fields(kind)]
        hints = typing.get_type_hints(kind)
        self._kind = kind
        self._get = _tuple_getter(names)
        self._nested = tuple(
            (index, part) for index, name in enumerate(names) for part in PARTS if _mentions(hints[name], part)
        )

    def pack(self, message: Any) -> tuple[Any, ...]:
        values = self._get(message)
        for index, part in self._nested:
            if values[index] is not None:
                values = (*values[:index], _FORMS[part].pack(values[index]), *values[index + 1 :])
        return values

    def unpack(self, values: tuple[Any, ...]) -> Any:
        for index, part in self._nested:
            if values[index] is not None:
                values = (*values[:index], _FORMS[part].unpack(values[index]), *values[index + 1 :])
        return self._kind(*values)


def _tuple_getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """attrgetter gives a tuple only for two names or more."""
    if len(names) > 1:
        return attrgetter(*names)
    getters = [attrgetter(name) for name in names]
    return lambda message: tuple(get(message) for get in getters)


def _mentions(hint: Any, part: type) -> bool:
    return hint is part or part in typing.get_args(hint)


_CODES = {kind: code for code, kind in enumerate(MESSAGES)}
_FORMS = {kind: _Form(kind) for kind in (*MESSAGES, *PARTS)}
