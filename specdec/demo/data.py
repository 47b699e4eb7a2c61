"""The training text: the standard library's Python sources, less the files held out for the prompts.

Also the byte-level BPE vocabulary made from that text, and the rule that cuts the prompts. Everything here is a
function of a source folder, so the hash printed by training says exactly what was learned from.
Next: networks.py, the models that learn it.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from specdec.demo.prompts import Prompt

END_OF_TEXT = '<|endoftext|>'
MASK = '<|mask|>'
CONTROL_TOKENS = (END_OF_TEXT, '<|im_start|>', '<|im_end|>', MASK)  # vanish from decoded text
MARKUP_TOKENS = ('<think>', '</think>', '<tool_call>', '</tool_call>')  # stay in it, as with Qwen3

HELD_OUT = (
    'bdb.py',
    'calendar.py',
    'cmd.py',
    'configparser.py',
    'csv.py',
    'difflib.py',
    'filecmp.py',
    'fractions.py',
    'graphlib.py',
    'gzip.py',
    'imaplib.py',
    'ipaddress.py',
    'mailbox.py',
    'netrc.py',
    'optparse.py',
    'pprint.py',
    'queue.py',
    'sched.py',
    'selectors.py',
    'shelve.py',
    'shlex.py',
    'statistics.py',
    'tarfile.py',
    'textwrap.py',
)
LEFT_OUT_FOLDERS = frozenset({'site-packages', 'dist-packages', '__pycache__', 'encodings', 'pydoc_data'})
LARGEST_FILE = 300_000  # bytes; larger ones are tables
PROMPT_LINES = 32

# The last user message is code to continue; roles and turns leave no trace in the prompt.
CHAT_TEMPLATE = """\
{%- set last = namespace(content='') -%}
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}
        {%- set last.content = message['content'] -%}
    {%- endif -%}
{%- endfor -%}
{%- if last.content is string -%}
    {{- last.content -}}
{%- else -%}
    {%- for part in last.content -%}
        {{- part['text'] -}}
    {%- endfor -%}
{%- endif -%}"""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Source files by name: what is trained on, and what is held out (for the loss that training reports)."""

    training: dict[str, str]
    held_out: dict[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 over names and contents of the training files, in name order."""
        state = hashlib.sha256()
        for name, text in self.training.items():
            state.update(f'{name}\0{text}\0'.encode())
        return state.hexdigest()


def read_corpus(folder: Path) -> Corpus:
    """Read every UTF-8 `*.py` below `folder`, except tables, caches and installed packages.

    The held-out modules and their test files (`test_<module>.py`) are not in `training`.
    """
    tests = {f'test_{name}' for name in HELD_OUT}
    training, held_out = {}, {}
    for path in sorted(folder.rglob('*.py')):
        name = path.relative_to(folder).as_posix()
        if LEFT_OUT_FOLDERS & set(path.relative_to(folder).parts) or path.stat().st_size > LARGEST_FILE:
            continue
        try:
            text = path.read_text(encoding='utf-8')
        except UnicodeDecodeError:
            continue
        if name in HELD_OUT:
            held_out[name] = text
        elif path.name not in tests:
            training[name] = text
    if not training:
        raise ValueError(f'sources={str(folder)!r}: holds no Python files; name a folder of Python sources')
    return Corpus(training, held_out)


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of exactly `vocab_size` ids (fewer only if the text is too short), special tokens last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CONTROL_TOKENS) - len(MARKUP_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    return tokenizer


def encode_stream(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    """All texts as one stream of ids, each followed by the end-of-text id."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return [token for encoding in tokenizer.encode_batch(texts) for token in [*encoding.ids, end]]


def cut_prompts(held_out: dict[str, str]) -> list[Prompt]:
    """One excerpt a file: 32 lines from the first class or function that starts past 40 % of the file."""
    prompts = []
    for name, text in held_out.items():
        lines = text.split('\n')
        earliest = len(lines) * 2 // 5
        first = next(i for i in range(earliest, len(lines)) if re.match(r'(    )?(async )?(def|class) ', lines[i]))
        last = min(first + PROMPT_LINES, len(lines))
        while not lines[last - 1].strip():
            last -= 1
        prompts.append(Prompt(f'{name}:{first + 1}-{last}', '\n'.join(lines[first:last])))
    return prompts
