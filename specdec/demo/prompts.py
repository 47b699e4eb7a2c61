"""The held-out code that the demo completes: excerpts of standard library files which training never saw.

They are data of the package (held_out/prompts.json, with its licence beside it), so every machine completes the same
text. Next: data.py, which keeps those files out of the training text and cut the excerpts.
"""

import json
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Prompt:
    """`name`: file and line numbers of the excerpt; `text`: the code to continue, without a final newline."""

    name: str
    text: str


def held_out_prompts() -> list[Prompt]:
    """All packaged excerpts; the first is the one that a demo shows."""
    content = json.loads((files('specdec.demo') / 'held_out' / 'prompts.json').read_text(encoding='utf-8'))
    return [Prompt(entry['name'], entry['text']) for entry in content['prompts']]
