"""Text to token ids and back, for the checkpoint's own fast tokenizer and chat template; never runs remote code.

Ids become text one step at a time, so the pieces must add up to the whole and never show half a character.
Next: stops.py, which searches the pieces for stop strings.
"""

import codecs
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from specdec.errors import CheckpointError, ConfigError, RequestError
from specdec.messages import ChatTemplateConfig
from specdec.models.hub import check_has_tokenizer

REPLACEMENT = '\ufffd'  # what a decoder writes for bytes that are no UTF-8 (yet)
MAX_HELD_TOKENS = 32  # text of so many tokens that still ends in half a character is given out as it is


class IncrementalDetokenizer(Protocol):
    """Token ids in, text out. The texts of all calls, flush included, add up to the text of all ids."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these ids complete; bytes of an unfinished character are held back."""

    def flush(self) -> str:
        """What is still held back, with U+FFFD for bytes that never became a character."""

    def copy(self) -> 'IncrementalDetokenizer': ...


class ByteDetokenizer:
    """For byte-level BPE: every id is a string of bytes, so text is UTF-8 decoding and costs O(1) per token."""

    __slots__ = ('_held', '_token_bytes')

    def __init__(self, token_bytes: Callable[[int], bytes], held: bytes = b'') -> None:
        self._token_bytes, self._held = token_bytes, held

    def push(self, token_ids: Iterable[int]) -> str:
        data = self._held + b''.join(map(self._token_bytes, token_ids))
        text, used = codecs.utf_8_decode(data, 'replace', False)
        self._held = data[used:]
        return text

    def flush(self) -> str:
        text, self._held = self._held.decode('utf-8', 'replace'), b''
        return text

    def copy(self) -> 'ByteDetokenizer':
        return ByteDetokenizer(self._token_bytes, self._held)


class WindowDetokenizer:
    """For every other decoder: decodes a short window of ids again for each token and gives out what is new.

    The window starts with the ids of the piece given out last, because such decoders treat a first token differently
    (they drop its leading space). `skipped_ids` have no text.
    """

    __slots__ = ('_decode', '_ids', '_num_done', '_skipped_ids')

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        skipped_ids: frozenset[int] = frozenset(),
        ids: Sequence[int] = (),
        num_done: int = 0,
    ) -> None:
        self._decode, self._skipped_ids, self._ids, self._num_done = decode, skipped_ids, list(ids), num_done

    def push(self, token_ids: Iterable[int]) -> str:
        return ''.join(self._push_one(i) for i in token_ids if i not in self._skipped_ids)

    def flush(self) -> str:
        done, whole = self._texts()
        self._ids, self._num_done = [], 0
        return whole[len(done) :]

    def copy(self) -> 'WindowDetokenizer':
        return WindowDetokenizer(self._decode, self._skipped_ids, self._ids, self._num_done)

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        done, whole = self._texts()
        num_held = len(self._ids) - self._num_done
        if num_held < MAX_HELD_TOKENS and (whole.endswith(REPLACEMENT) or len(whole) <= len(done)):
            return ''
        del self._ids[: self._num_done]
        self._num_done = len(self._ids)
        return whole[len(done) :]

    def _texts(self) -> tuple[str, str]:
        return self._decode(self._ids[: self._num_done]), self._decode(self._ids)


class Tokenizer:
    """A checkpoint's tokenizer and chat template (`chat_template`: Jinja text instead of its own). Thread-safe."""

    def __init__(self, hf_tokenizer: Any, chat_template: str | None = None) -> None:
        from tokenizers import decoders

        self._hf = hf_tokenizer
        self._backend = hf_tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._chat_template = chat_template
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content for i, token in added.items()}
        self._is_byte_level = isinstance(self._backend.decoder, decoders.ByteLevel)
        self._byte_tables = {skip: self._byte_table(skip) for skip in (True, False)} if self._is_byte_level else {}
        if chat_template is not None:
            self._check_chat_template()

    @classmethod
    def load(cls, folder: str | Path, chat_template_config: ChatTemplateConfig | None = None) -> 'Tokenizer':
        """Reads tokenizer files from a local folder. CheckpointError if there are none that can be served."""
        if not Path(folder).is_dir():
            raise CheckpointError('tokenizer', str(folder), 'is no folder')
        check_has_tokenizer(Path(folder))
        from transformers import AutoTokenizer

        try:
            hf_tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        except Exception as error:  # every tokenizer class has its own ways to fail on a broken file
            cause = f'{type(error).__name__}: {error}'.splitlines()[0]
            raise CheckpointError('tokenizer', str(folder), f'cannot be read; download it again ({cause})') from error
        if not hf_tokenizer.is_fast:
            raise CheckpointError('tokenizer', str(folder), 'has no fast version; add a tokenizer.json')
        if chat_template_config is None or chat_template_config.chat_template is None:
            return cls(hf_tokenizer)
        return cls(hf_tokenizer, read_chat_template(chat_template_config.chat_template))

    @property
    def eos_id(self) -> int | None:
        return self._hf.eos_token_id

    @property
    def hf_tokenizer(self) -> Any:
        """The tokenizer as transformers has it."""
        return self._hf

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids whose text is left out unless somebody asks for it."""
        return self._special_ids

    def token_id(self, text: str) -> int | None:
        """The id of the token that is exactly this text, if there is one."""
        return self._backend.token_to_id(text)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None or self._hf.chat_template is not None

    def template_reads(self, name: str) -> bool:
        """Whether the chat template reads a variable of that name, other than one that it sets itself."""
        variables = self._template_variables
        return name in variables if variables is not None else self.template_mentions(name)

    def template_mentions(self, name: str) -> bool:
        """Whether the name stands in the chat template at all, as messages' own fields do."""
        return any(name in template for template in self._templates)

    @property
    def _templates(self) -> list[str]:
        """The chat template, or all of them where a checkpoint has several, by purpose."""
        template = self._hf.chat_template if self._chat_template is None else self._chat_template
        if template is None:
            return []
        return list(template.values()) if isinstance(template, dict) else [template]

    @functools.cached_property
    def _template_variables(self) -> frozenset[str] | None:
        """None for a template that needs more than plain Jinja to be parsed."""
        import jinja2
        from jinja2 import meta

        environment = jinja2.Environment(extensions=['jinja2.ext.loopcontrols'])
        try:
            found = [meta.find_undeclared_variables(environment.parse(template)) for template in self._templates]
        except jinja2.TemplateError:
            return None
        return frozenset().union(*found)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids; `add_special` adds what the tokenizer puts around every text (nothing for Qwen, BOS for some)."""
        return self._backend.encode(_well_formed(text), add_special_tokens=add_special).ids

    def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **template_arguments: Any
    ) -> list[int]:
        """Renders messages through the chat template, the opening of the answer included; RequestError if it fails."""
        return self.encode(self.render_chat(messages, tools, **template_arguments), add_special=False)

    def render_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **template_arguments: Any
    ) -> str:
        if not self.has_chat_template:
            raise RequestError('messages', '[...]', 'the model has no chat template; pass plain text, or set one')
        arguments = {'add_generation_prompt': True} | template_arguments
        try:
            return self._hf.apply_chat_template(
                [_text_message(message) for message in messages],
                tools=tools,
                chat_template=self._chat_template,
                tokenize=False,
                **arguments,
            )
        except RequestError:
            raise
        except Exception as error:  # a template may fail in any way; it is the checkpoint's or the user's program
            cause = str(error).strip().split('\n')[0] or type(error).__name__
            raise RequestError('messages', messages, f'the chat template refuses them: {cause}') from error

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The whole text of these ids: what a detokenizer gives for them in any number of pieces."""
        detokenizer = self.detokenizer(skip_special_tokens, spaces_between_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def detokenizer(
        self, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> IncrementalDetokenizer:
        """`spaces_between_special_tokens` False joins neighbouring added tokens where the decoder writes a space."""
        if self._is_byte_level:
            return ByteDetokenizer(self._byte_tables[skip_special_tokens].__getitem__)
        if skip_special_tokens or spaces_between_special_tokens:
            return WindowDetokenizer(self._decode_whole, self._special_ids if skip_special_tokens else frozenset())
        return WindowDetokenizer(self._decode_unspaced)

    def token_text(self, token_id: int) -> str:
        """One token by itself, special or not (U+FFFD where it holds part of a character)."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes; of other than byte-level tokenizers, those of its text."""
        if self._is_byte_level:
            return self._byte_tables[False][token_id]
        return self.token_text(token_id).encode()

    def _byte_table(self, skip_special_tokens: bool) -> '_ByteTable':
        return _ByteTable(self._backend.id_to_token, self._special_ids if skip_special_tokens else frozenset())

    def _decode_whole(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def _decode_unspaced(self, token_ids: Sequence[int]) -> str:
        """Decodes runs of ordinary ids, and writes added tokens between them as they are."""
        parts: list[str] = []
        run: list[int] = []
        for token_id in token_ids:
            if token_id in self._added:
                parts += [self._backend.decode(run), self._added[token_id]]
                run = []
            else:
                run.append(token_id)
        return ''.join([*parts, self._backend.decode(run)])

    def _check_chat_template(self) -> None:
        from jinja2 import TemplateSyntaxError

        try:
            self.render_chat([{'role': 'user', 'content': 'Hello'}])
        except RequestError as error:
            if isinstance(error.__cause__, TemplateSyntaxError):
                raise ConfigError('chat_template', self._chat_template, f'is no Jinja: {error.__cause__}') from None


def read_chat_template(text_or_path: str) -> str:
    """Jinja text as it is, or the content of the file of that name; ConfigError if it is neither."""
    if '{' in text_or_path or '\n' in text_or_path:
        return text_or_path
    try:
        return Path(text_or_path).read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        remedy = f'is neither Jinja text nor a readable file ({error})'
        raise ConfigError('chat_template', text_or_path, remedy) from error


class _ByteTable(dict[int, bytes]):
    """Bytes of every id met so far; b'' for special ids when those are skipped, and for ids beyond the vocabulary."""

    def __init__(self, id_to_token: Callable[[int], str | None], skipped_ids: frozenset[int]) -> None:
        super().__init__()
        self._id_to_token, self._skipped_ids = id_to_token, skipped_ids

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped_ids else self._id_to_token(token_id)
        self[token_id] = value = b'' if token is None else _bytes_of(token)
        return value


def _bytes_of(token: str) -> bytes:
    """A byte-level token's bytes: one character a byte, or plain text if any character stands for no byte."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, other bytes for U+0100, U+0101, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _well_formed(text: str) -> str:
    if not isinstance(text, str):
        raise RequestError('prompt', text, 'must be text')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError('prompt', text, f'holds a lone surrogate at character {error.start}') from None
    return text


def _text_message(message: Any) -> dict[str, Any]:
    """A message whose content is one string; RequestError for a malformed one, or for images and other media."""
    if not isinstance(message, dict) or not isinstance(message.get('role'), str):
        raise RequestError('messages', message, "each must be a dict with a 'role' and a 'content'")
    content = message.get('content')
    if content is None:
        return message | {'content': ''}
    if isinstance(content, str):
        return message
    if not isinstance(content, (list, tuple)):
        raise RequestError('messages', message, "'content' must be text or a list of parts")
    return message | {'content': ''.join(map(_part_text, content))}


def _part_text(part: Any) -> str:
    if isinstance(part, dict) and part.get('type') == 'text' and isinstance(part.get('text'), str):
        return part['text']
    kind = part.get('type') if isinstance(part, dict) else part
    raise RequestError('messages', kind, "only parts of type 'text' can be served (no images, audio or video)")
