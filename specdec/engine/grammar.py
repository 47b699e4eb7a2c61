"""Structured output: formats become compiled grammars on the server's side, guides walk them on the engine's.

Only this file knows xgrammar, and imports it when the first format is asked for. A compiled grammar crosses between
processes in xgrammar's own serialised form. Next: agent/grammar_masks.py, which asks guides for masks.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from specdec.agent.state import mask_words
from specdec.engine.grammar_limits import check_format, check_schema
from specdec.errors import RequestError
from specdec.messages import GrammarVocabulary
from specdec.plan import Admit

if TYPE_CHECKING:
    import xgrammar

    from specdec.engine.tokenizer import Tokenizer

MAX_FORMAT_CHARACTERS = 65536
MAX_CHOICES = 1024
MAX_WHITESPACE = 20  # between two parts of a JSON text: enough for indentation, and an end to it
MAX_SERIALISED = 2**25  # bytes of a compiled grammar
MAX_CACHED = 2**26  # bytes of compiled grammars kept, on either side, as serialised
TOOL_STYLES = {'qwen3': 'qwen_3', 'qwen': 'qwen_3', 'qwen2d5': 'qwen_3', 'qwen3coder': 'qwen_3_5'}  # by tool parser

# what response_format may have as its type
FORMATS = "'json_object', 'json_schema', 'regex' (or 'regex_schema'), 'ebnf', 'choice', 'structural_tag', 'text'"


# ------------------------------------------------------------------------------------------------ the server's side
class GrammarCompiler:
    """Compiles the formats of one model's requests, one at a time; keeps what it compiled."""

    def __init__(self, tokenizer: 'Tokenizer', vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, list(eos_ids)
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._compiled: OrderedDict[str, str] = OrderedDict()
        self.vocabulary: GrammarVocabulary | None = None  # there once something was compiled

    def compile(self, response_format: dict[str, Any]) -> str | None:
        """The format's grammar, serialised; None for plain text. RequestError if it is no valid format."""
        if response_format.get('type') == 'text':
            return None
        key = _as_json(response_format)
        if len(key) > MAX_FORMAT_CHARACTERS:
            limit = f'at most {MAX_FORMAT_CHARACTERS} characters as JSON'
            raise RequestError('response_format', f'{len(key)} characters', limit)
        if key not in self._compiled:
            check_format(response_format)
            self._compiled[key] = self._compile(response_format)
            _keep_within(self._compiled, self._compiled.values())
        self._compiled.move_to_end(key)
        return self._compiled[key]

    def find(self, response_format: dict[str, Any]) -> str | None:
        """The same if it was compiled already, without waiting for anybody; None if not."""
        return self._compiled.get(_as_json(response_format))

    def _compile(self, response_format: dict[str, Any]) -> str:
        compiler = self._compiler or self._open()
        try:
            serialised = _compile(compiler, response_format).serialize_json()
        except RequestError:
            raise
        except Exception as error:  # whatever xgrammar, or pydantic inside it, finds wrong with it
            raise RequestError('response_format', response_format, f'is not valid: {_cause(error)}') from None
        if len(serialised) > MAX_SERIALISED:
            size = f'{len(serialised) >> 20} MiB when compiled'
            raise RequestError('response_format', size, f'at most {MAX_SERIALISED >> 20} MiB; make it simpler')
        return serialised

    def _open(self) -> 'xgrammar.GrammarCompiler':
        try:
            import xgrammar
        except ImportError:
            raise RequestError(
                'response_format', '{...}', "needs xgrammar; install '.[grammar]'", 'unsupported_value'
            ) from None
        if not self._eos_ids:
            raise RequestError('response_format', '{...}', 'this model has no end-of-text token to end a grammar with')
        info = xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer.hf_tokenizer, vocab_size=self._vocab_size, stop_token_ids=self._eos_ids
        )
        words = info.decoded_vocab
        for token_id in self._tokenizer.special_ids:  # their text is not shown, so it must not count as text
            if token_id < len(words):
                words[token_id] = b''
        info = xgrammar.TokenizerInfo(
            words,
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=self._vocab_size,
            stop_token_ids=self._eos_ids,
            add_prefix_space=info.add_prefix_space,
        )
        self.vocabulary = GrammarVocabulary(info.serialize_json())
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_limit_bytes=2**26)
        return self._compiler


def _compile(compiler: 'xgrammar.GrammarCompiler', asked: dict[str, Any]) -> 'xgrammar.CompiledGrammar':
    kind = asked.get('type')
    if kind == 'json_object':
        return compiler.compile_json_schema('{"type": "object"}', strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE)
    if kind == 'json_schema':
        schema = _part(asked, 'json_schema', dict)
        if 'schema' in schema:  # OpenAI wraps the schema; LMDeploy takes it either way
            schema = _part(schema, 'schema', dict)
        return compiler.compile_json_schema(_as_json(schema), max_whitespace_cnt=MAX_WHITESPACE)
    if kind in ('regex', 'regex_schema'):
        return compiler.compile_regex(_part(asked, kind, str))
    if kind == 'ebnf':
        return compiler.compile_grammar(_part(asked, 'ebnf', str))
    if kind == 'choice':
        return compiler.compile_structural_tag(_choice(_part(asked, 'choice', list)))
    if kind == 'structural_tag':
        return compiler.compile_structural_tag(_structural_tag(asked))
    raise RequestError('response_format', kind, f'its type must be one of {FORMATS}', 'unsupported_value')


def _part(asked: dict[str, Any], name: str, kind: type) -> Any:
    value = asked.get(name)
    if not isinstance(value, kind) or not value:
        raise RequestError('response_format', asked, f"needs a {kind.__name__} as '{name}', which is not empty")
    return value


def _choice(texts: list[Any]) -> str:
    if not all(isinstance(text, str) and text for text in texts):
        raise RequestError('response_format', texts, "each 'choice' must be a non-empty string")
    if len(texts) > MAX_CHOICES:
        raise RequestError('response_format', f'{len(texts)} choices', f'at most {MAX_CHOICES}')
    elements = [{'type': 'const_string', 'value': text} for text in texts]
    return _as_json({'type': 'structural_tag', 'format': {'type': 'or', 'elements': elements}})


def _structural_tag(asked: dict[str, Any]) -> str:
    """xgrammar's `format`, or the older form that LMDeploy takes: `structures` and `triggers`."""
    if 'structures' not in asked:
        return _as_json({'type': 'structural_tag', 'format': _part(asked, 'format', dict)})
    tags = [
        {
            'begin': _part(one, 'begin', str),
            'content': {'type': 'json_schema', 'json_schema': _part(one, 'schema', dict)},
            'end': _part(one, 'end', str),
        }
        for one in _part(asked, 'structures', list)
    ]
    triggered = {'type': 'triggered_tags', 'triggers': _part(asked, 'triggers', list), 'tags': tags}
    return _as_json({'type': 'structural_tag', 'format': triggered})


def tools_format(parser: str, tools: list[dict[str, Any]], choice: str | dict[str, Any]) -> dict[str, Any]:
    """A response_format for answers that call one of these tools, in the form that the tool parser reads.

    `choice`: 'required', or {'type': 'function', 'function': {'name': ...}}. RequestError if it is neither.
    """
    try:
        import xgrammar
    except ImportError:
        raise RequestError('tool_choice', choice, "needs xgrammar; install '.[grammar]'", 'unsupported_value') from None
    for tool in tools:
        check_schema(tool.get('function', tool).get('parameters') or {}, 'tools')
    try:
        tag = xgrammar.get_model_structural_tag(TOOL_STYLES[parser], tools, choice, reasoning='disabled')
    except Exception as error:
        raise RequestError('tool_choice', choice, f'cannot be served with these tools: {_cause(error)}') from None
    found = json.loads(tag.model_dump_json(by_alias=True, exclude_none=True))
    if found['format'].get('type') == 'triggered_tags':
        found['format']['stop_after_first'] = True  # one call, and the answer ends
    return found


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=False)
    except (TypeError, ValueError, RecursionError):
        raise RequestError('response_format', value, 'must be JSON') from None


def _cause(error: Exception) -> str:
    """The first line that says something, without the place in xgrammar's source."""
    text = re.sub(r'^\[[\d:]+\] \S+?:\d+: ', '', str(error).strip())
    return text.splitlines()[0][:300] if text else type(error).__name__


def _keep_within(cache: OrderedDict[str, Any], serialised: Iterable[str]) -> None:
    """Drop the oldest until what is kept is small enough; the newest stays."""
    total = sum(map(len, serialised))
    while total > MAX_CACHED and len(cache) > 1:
        key, value = cache.popitem(last=False)
        total -= len(value if isinstance(value, str) else key)


# ------------------------------------------------------------------------------------------------ the engine's side
class GrammarGuides:
    """Turns serialised grammars into guides; keeps the last ones ready."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._info: xgrammar.TokenizerInfo | None = None
        self._grammars: OrderedDict[str, xgrammar.CompiledGrammar] = OrderedDict()

    def set_vocabulary(self, serialised: str) -> None:
        import xgrammar

        self._info = xgrammar.TokenizerInfo.deserialize_json(serialised)

    def prepare(self, serialised: str) -> 'xgrammar.CompiledGrammar':
        """Ready to be walked. RequestError if it does not belong to the vocabulary."""
        import xgrammar

        if serialised not in self._grammars:
            if self._info is None:
                raise RequestError('response_format', '{...}', 'came before the vocabulary')
            try:
                self._grammars[serialised] = xgrammar.CompiledGrammar.deserialize_json(serialised, self._info)
            except Exception as error:
                raise RequestError('response_format', '{...}', f'does not fit the model: {_cause(error)}') from None
            _keep_within(self._grammars, self._grammars)
        self._grammars.move_to_end(serialised)
        return self._grammars[serialised]

    def make(self, admit: Admit) -> 'GrammarGuide':
        import xgrammar

        assert admit.params.grammar is not None, 'a guide needs a grammar'
        matcher = xgrammar.GrammarMatcher(self.prepare(admit.params.grammar))
        return GrammarGuide(matcher, admit, self._vocab_size)


class GrammarGuide:
    """One request's place in its grammar; also what else its masks say: allowed ids, and stop ids that come too early.

    While a reasoning section is open in the prompt the grammar waits behind its closing token.
    """

    def __init__(self, matcher: 'xgrammar.GrammarMatcher', admit: Admit, vocab_size: int) -> None:
        params = admit.params
        self._matcher = matcher
        self._num_emitted, self._min_tokens = 0, params.min_new_tokens
        self._closing_id = -1 if params.think_ids is None else params.think_ids[1]
        self._waits = params.reasoning_open
        self._allowed = mask_words(params.allowed_ids, vocab_size) if params.allowed_ids else None
        self._no_stops = ~mask_words(params.stop_ids, vocab_size)
        self.advance(admit.output_ids)

    def advance(self, token_ids: Sequence[int]) -> None:
        self._num_emitted += len(token_ids)
        for token_id in token_ids:
            if self._waits:
                self._waits = token_id != self._closing_id
            elif not self._matcher.is_terminated():  # a step launched before the end was read has nothing to say
                accepted = self._matcher.accept_token(token_id)
                assert accepted, f'token {token_id} was emitted against its grammar'

    def fill(self, drafts: Sequence[int], masks: Tensor) -> None:
        waits, num_walked = self._waits, 0
        if not waits and self._matcher.is_terminated():
            return  # it ended in a step not read then; this one gives it nothing
        for step, mask in enumerate(masks):
            if not waits:
                self._matcher.fill_next_token_bitmask(masks, step)
            self._narrow(mask, step)
            if step == len(drafts) or not _allows(mask, drafts[step]):
                break
            if waits:
                waits = drafts[step] != self._closing_id
                continue
            accepted = self._matcher.accept_token(drafts[step])
            num_walked += accepted
            if not accepted or self._matcher.is_terminated():
                break
        self._matcher.rollback(num_walked)

    def _narrow(self, mask: Tensor, step: int) -> None:
        if self._allowed is not None:
            mask &= self._allowed
        if self._num_emitted + step < self._min_tokens:
            longer = mask & self._no_stops
            if bool(longer.any()):  # where only an end is left, the minimum gives way
                mask.copy_(longer)


def _allows(mask: Tensor, token_id: int) -> bool:
    return bool((int(mask[token_id >> 5]) >> (token_id & 31)) & 1)
