"""Answers as the bytes of a stream, and as one JSON object: for chat, completions and /generate.

A stream's chunks differ in a few places only, so the rest is written once per request; a chunk costs no dictionary.
Next: answers.py, which sends them.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.engine.live_request import LiveRequest
from specdec.engine.tokenizer import IncrementalDetokenizer, Tokenizer
from specdec.messages import Response
from specdec.serve.parsers.answer_parser import AnswerParser, Parts
from specdec.serve.parsers.reasoning import ReasoningTokens
from specdec.serve.parsers.tools import ToolDelta
from specdec.serve.text import dumps

DONE = b'data: [DONE]\n\n'


def event(text: str) -> bytes:
    return f'data: {text}\n\n'.encode()


@dataclass(slots=True)
class Usage:
    """Token counts of one or more choices; a prompt that several choices share counts once, with its first choice."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, response: Response, reasoning_tokens: int = 0) -> None:
        """Counts of a request's last piece."""
        if response.choice == 0:
            self.prompt_tokens += response.input_token_len
            self.cached_tokens += response.cached_tokens
        self.completion_tokens += response.generate_token_len
        self.reasoning_tokens += min(reasoning_tokens, response.generate_token_len)

    def as_dictionary(self) -> dict[str, Any]:
        return {
            'prompt_tokens': self.prompt_tokens,
            'completion_tokens': self.completion_tokens,
            'total_tokens': self.prompt_tokens + self.completion_tokens,
            'prompt_tokens_details': {'cached_tokens': self.cached_tokens},
            'completion_tokens_details': {'reasoning_tokens': self.reasoning_tokens},
        }


class TokenMarks:
    """Which text came from which token, and whether a draft had proposed it: for who asks with return_speculation.

    Marks are given out as their text is shown, so they never tell of a stop string what the text holds back.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer) -> None:
        self._detokenizer = detokenizer
        self._pending: list[tuple[str, int]] = []  # text, 1 if it was drafted
        self._num_shown = 0  # characters shown beyond the marks given out

    def push(self, live: LiveRequest, piece: Response) -> list[tuple[str, int]]:
        flags = [flag for _, _, accepted in live.taken_steps for flag in (*[1] * accepted, 0)]
        for token_id, flag in zip(piece.token_ids, flags):
            self._pending.append((self._detokenizer.push((token_id,)), flag))
        if piece.finish_reason is not None:
            self._pending.append((self._detokenizer.flush(), 0))
        self._num_shown += len(piece.text)
        marks = []
        while self._pending and len(self._pending[0][0]) <= self._num_shown:
            text, flag = self._pending.pop(0)
            self._num_shown -= len(text)
            marks.append((text, flag))
        if piece.finish_reason is not None and self._pending and self._num_shown:
            text, flag = self._pending[0]
            marks.append((text[: self._num_shown], flag))
        return [mark for mark in marks if mark[0]]


def speculation_of(live: LiveRequest, piece: Response, marks: TokenMarks) -> str:
    """The `speculation` object of a chunk."""
    decoded = [(drafted, accepted) for decode, drafted, accepted in live.taken_steps if decode]
    return dumps(
        {
            'drafted': sum(drafted for drafted, _ in decoded),
            'accepted': sum(accepted for _, accepted in decoded),
            'steps': decoded,
            'tokens': marks.push(live, piece),
        }
    )


def speculation_total(response: Response) -> dict[str, Any]:
    """The `speculation` object of a whole answer."""
    figures = response.speculation
    return {
        'steps': figures.steps,
        'drafted': figures.drafted,
        'accepted': figures.accepted,
        'mean_accepted_length': round(figures.mean_accepted_length, 4),
    }


# ------------------------------------------------------------------------------------------------- log-probabilities
def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[dict[int, float]], num_top: int) -> list[dict[str, Any]]:
    """One object per emitted token; an entry has the emitted token's id first."""
    return [_chat_logprob(tokenizer, entry, num_top) for entry in entries]


def _chat_logprob(tokenizer: Tokenizer, entry: dict[int, float], num_top: int) -> dict[str, Any]:
    chosen = next(iter(entry))
    best = sorted(entry, key=lambda i: -entry[i])[:num_top]
    return _token(tokenizer, chosen, entry) | {'top_logprobs': [_token(tokenizer, i, entry) for i in best]}


def _token(tokenizer: Tokenizer, token_id: int, entry: dict[int, float]) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {'token': tokenizer.token_text(token_id), 'logprob': _finite(entry[token_id]), 'bytes': list(data)}


def completion_logprobs(
    tokenizer: Tokenizer, entries: Sequence[dict[int, float]], num_top: int, offset: int
) -> tuple[dict[str, Any], int]:
    """OpenAI's older form, and the offset of the text after it, in characters."""
    tokens, offsets, tops = [], [], []
    for entry in entries:
        text = tokenizer.token_text(next(iter(entry)))
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        best = sorted(entry, key=lambda i: -entry[i])[:num_top]
        tops.append({tokenizer.token_text(i): _finite(entry[i]) for i in best})
    values = [_finite(next(iter(entry.values()))) for entry in entries]
    return {'tokens': tokens, 'token_logprobs': values, 'top_logprobs': tops, 'text_offset': offsets}, offset


def _finite(value: float) -> float:
    """OpenAI's -9999 for a token that cannot occur: JSON has no infinity."""
    return value if value > -9999.0 else -9999.0


# --------------------------------------------------------------------------------------------------------- writers
@dataclass(frozen=True, slots=True)
class Wishes:
    """What an answer shall contain beside its text. `num_top` None: no log-probabilities."""

    usage_chunk: bool = False
    num_top: int | None = None
    token_ids: bool = False
    speculation: bool = False


class ChatChoice:
    """One chat answer being written; `parser` None shows the text as it is."""

    def __init__(
        self,
        answer: 'Answer',
        live: LiveRequest,
        index: int,
        parser: AnswerParser | None,
        counter: ReasoningTokens | None,
        marks: TokenMarks,
    ) -> None:
        self.live, self.index = live, index
        self._answer, self._parser, self._counter, self._marks = answer, parser, counter, marks
        self._is_first = True
        self._head, self._tail = answer.frame('chat.completion.chunk', index)

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._counter is None else self._counter.count

    def chunk(self, piece: Response) -> bytes:
        """The bytes of a piece; b'' if it shows nothing."""
        wishes = self._answer.wishes
        finish = piece.finish_reason
        if self._counter is not None:
            self._counter.push([self._answer.tokenizer.token_text(i) for i in piece.token_ids])
        delta = self._plain(piece.text) if self._parser is None else self._parsed(piece)
        extras = ''
        if wishes.num_top is not None and piece.logprobs:
            content = chat_logprobs(self._answer.tokenizer, piece.logprobs, wishes.num_top)
            extras += f',"logprobs":{{"content":{dumps(content)},"refusal":null}}'
        if wishes.token_ids and piece.token_ids:
            extras += f',"output_ids":{dumps(piece.token_ids)}'
        if not delta and not extras and finish is None and not wishes.speculation:
            return b''
        if self._is_first:
            self._is_first = False
            delta = f'"role":"assistant",{delta}' if delta else '"role":"assistant","content":""'
        reason = 'null' if finish is None else f'"{self._reason(finish)}"'
        tail = self._tail
        if wishes.speculation:
            tail = f',"speculation":{speculation_of(self.live, piece, self._marks)}{tail}'
        return f'{self._head}{{{delta}}}{extras},"finish_reason":{reason}}}]{tail}'.encode()

    def choice(self, response: Response) -> dict[str, Any]:
        """The whole answer."""
        wishes = self._answer.wishes
        if self._counter is not None:
            self._counter.push([self._answer.tokenizer.token_text(i) for i in response.token_ids])
        parts = Parts(response.text) if self._parser is None else self._parser.push(response.text, last=True)
        calls = self._calls(parts.calls)
        message: dict[str, Any] = {'role': 'assistant', 'content': parts.content or (None if calls else '')}
        message |= {'refusal': None, 'reasoning_content': parts.reasoning or None, 'tool_calls': calls or None}
        logprobs = None
        if wishes.num_top is not None:
            content = chat_logprobs(self._answer.tokenizer, response.logprobs or [], wishes.num_top)
            logprobs = {'content': content, 'refusal': None}
        choice = {'index': self.index, 'message': message, 'logprobs': logprobs}
        if wishes.token_ids:
            choice['output_ids'] = response.token_ids
        return choice | {'finish_reason': self._reason(response.finish_reason)}

    def _plain(self, text: str) -> str:
        return f'"content":{dumps(text)}' if text else ''

    def _parsed(self, piece: Response) -> str:
        parts = self._parser.push(piece.text, last=piece.finish_reason is not None)
        fields = [f'"reasoning_content":{dumps(parts.reasoning)}'] if parts.reasoning else []
        if parts.content:
            fields.append(f'"content":{dumps(parts.content)}')
        if parts.calls:
            fields.append(f'"tool_calls":{dumps([self._call_delta(delta) for delta in parts.calls])}')
        return ','.join(fields)

    def _call_delta(self, delta: ToolDelta) -> dict[str, Any]:
        if delta.name is None:
            return {'index': delta.index, 'function': {'arguments': delta.arguments}}
        function = {'name': delta.name, 'arguments': delta.arguments}
        return {'index': delta.index, 'id': new_id('call'), 'type': 'function', 'function': function}

    def _calls(self, deltas: list[ToolDelta]) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        for delta in deltas:
            if delta.name is not None:
                function = {'name': delta.name, 'arguments': delta.arguments}
                calls.append({'id': new_id('call'), 'type': 'function', 'function': function})
            else:
                calls[delta.index]['function']['arguments'] += delta.arguments
        return calls

    def _reason(self, finish_reason: str) -> str:
        has_calls = self._parser is not None and self._parser.num_calls > 0
        return 'tool_calls' if has_calls and finish_reason == 'stop' else finish_reason


class CompletionChoice:
    """One completion being written."""

    reasoning_tokens = 0

    def __init__(self, answer: 'Answer', live: LiveRequest, index: int, marks: TokenMarks) -> None:
        self.live, self.index = live, index
        self._answer, self._marks = answer, marks
        self._offset = 0
        self._head, self._tail = answer.frame('text_completion', index)

    def chunk(self, piece: Response) -> bytes:
        wishes = self._answer.wishes
        finish = piece.finish_reason
        if not piece.text and not piece.logprobs and finish is None and not wishes.speculation and not wishes.token_ids:
            return b''
        logprobs = 'null'
        if wishes.num_top is not None:
            entries = piece.logprobs or []
            value, self._offset = completion_logprobs(self._answer.tokenizer, entries, wishes.num_top, self._offset)
            logprobs = dumps(value)
        reason = 'null' if finish is None else f'"{finish}"'
        tail = self._tail
        if wishes.speculation:
            tail = f',"speculation":{speculation_of(self.live, piece, self._marks)}{tail}'
        ids = f',"output_ids":{dumps(piece.token_ids)}' if wishes.token_ids and piece.token_ids else ''
        return (
            f'{self._head}{dumps(piece.text)},"logprobs":{logprobs}{ids},"finish_reason":{reason}}}]{tail}'
        ).encode()

    def choice(self, response: Response) -> dict[str, Any]:
        wishes = self._answer.wishes
        logprobs = None
        if wishes.num_top is not None:
            logprobs, _ = completion_logprobs(self._answer.tokenizer, response.logprobs or [], wishes.num_top, 0)
        choice = {'index': self.index, 'text': response.text, 'logprobs': logprobs}
        if wishes.token_ids:
            choice['output_ids'] = response.token_ids
        return choice | {'finish_reason': response.finish_reason}


class GenerateChoice:
    """An answer of /generate, LMDeploy's form."""

    reasoning_tokens = 0

    def __init__(self, answer: 'Answer', live: LiveRequest, marks: TokenMarks) -> None:
        self.live, self.index = live, 0
        self._answer, self._marks = answer, marks

    def chunk(self, piece: Response) -> bytes:
        if not piece.text and not piece.token_ids and piece.finish_reason is None:
            return b''
        value = self.choice(piece)
        if self._answer.wishes.speculation:
            speculation = speculation_of(self.live, piece, self._marks)
            return event(f'{dumps(value)[:-1]},"speculation":{speculation}}}')
        return event(dumps(value))

    def choice(self, response: Response) -> dict[str, Any]:
        num_top = self._answer.wishes.num_top
        meta: dict[str, Any] = {
            'id': self._answer.id,
            'prompt_tokens': response.input_token_len,
            'completion_tokens': response.generate_token_len,
            'cached_tokens': response.cached_tokens,
            'finish_reason': None if response.finish_reason is None else {'type': response.finish_reason},
        }
        if num_top is not None:
            entries = response.logprobs or []
            meta['output_token_logprobs'] = [[_finite(entry[i]), i] for entry in entries for i in list(entry)[:1]]
            if num_top:
                meta['output_top_logprobs'] = [_best(entry, num_top) for entry in entries]
        return {'text': response.text, 'output_ids': response.token_ids, 'meta_info': meta}


def _best(entry: dict[int, float], num_top: int) -> list[list[float | int]]:
    return [[_finite(entry[i]), i] for i in sorted(entry, key=lambda i: -entry[i])[:num_top]]


Choice = ChatChoice | CompletionChoice | GenerateChoice


@dataclass(slots=True)
class Answer:
    """What all choices of an answer share, and what stands around them."""

    kind: str  # 'chatcmpl', 'cmpl' or 'gen'
    model: str
    tokenizer: Tokenizer
    wishes: Wishes
    id: str = ''
    created: int = 0
    usage: Usage = field(default_factory=Usage)

    def __post_init__(self) -> None:
        self.id = self.id or new_id(self.kind)
        self.created = self.created or int(time.time())

    def frame(self, object_name: str, index: int) -> tuple[str, str]:
        """What stands before a chunk's delta (or text), and after its `choices`."""
        value = 'delta' if self.kind == 'chatcmpl' else 'text'
        head = f'data: {self._envelope(object_name)},"choices":[{{"index":{index},"{value}":'
        return head, (',"usage":null' if self.wishes.usage_chunk else '') + '}\n\n'

    def end(self, object_name: str) -> bytes:
        """The end of a stream: the usage if it was asked for, then [DONE]."""
        if not self.wishes.usage_chunk:
            return DONE
        return event(f'{self._envelope(object_name)},"choices":[],"usage":{dumps(self.usage.as_dictionary())}}}') + DONE

    def whole(self, object_name: str, choices: list[dict[str, Any]], speculation: dict[str, Any] | None) -> bytes:
        """The answer without a stream."""
        text = f'{self._envelope(object_name)},"choices":{dumps(choices)},"usage":{dumps(self.usage.as_dictionary())}'
        if speculation is not None:
            text += f',"speculation":{dumps(speculation)}'
        return (text + '}').encode()

    def _envelope(self, object_name: str) -> str:
        """The beginning of an object, without its end."""
        model = dumps(self.model)
        return f'{{"id":"{self.id}","object":"{object_name}","created":{self.created},"model":{model}'


def new_id(kind: str) -> str:
    return f'{kind}-{secrets.token_hex(12)}'
