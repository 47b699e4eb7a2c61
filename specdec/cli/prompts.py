"""Prompts from a file, for commands and benchmarks: conversations, as a chat template takes them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec.demo.prompts import held_out_prompts
from specdec.errors import ConfigError

Conversation = list[dict[str, Any]]


def read_prompts(file: Path | None) -> list[Conversation]:
    """One for each line: in a .jsonl file a text, {"prompt": ...} or {"messages": ...}, else plain text. None: the
    packaged held-out code. ConfigError for a file that cannot be read so.
    """
    if file is None:
        return [[{'role': 'user', 'content': prompt.text}] for prompt in held_out_prompts()]
    try:
        lines = [line for line in file.read_text(encoding='utf-8').splitlines() if line.strip()]
        found = list(_conversations([json.loads(line) if file.suffix == '.jsonl' else line for line in lines]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = f'not readable ({error}); give a text, {{"prompt": ...}} or {{"messages": ...}} in each line'
        raise ConfigError('prompts', str(file), remedy) from None
    if not found:
        raise ConfigError('prompts', str(file), 'has no prompt; give one in each line')
    return found


def _conversations(values: list[Any]) -> Iterator[Conversation]:
    for value in values:
        if isinstance(value, dict) and 'messages' in value:
            yield value['messages']
        else:
            yield [{'role': 'user', 'content': value['prompt'] if isinstance(value, dict) else value}]
