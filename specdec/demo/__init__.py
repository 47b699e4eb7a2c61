"""A demo that is real: a small target trained on Python's standard library, and two drafts distilled from it.

The checkpoints are ordinary folders inside the package; train.py made them and docs/demo.md tells how.
Next: prompts.py, the code that the demo completes.
"""

from importlib.resources import files
from pathlib import Path
from typing import Literal, get_args

DemoModel = Literal['target', 'dflash', 'dspark']


def demo_folder(name: DemoModel) -> Path:
    """The packaged checkpoint folder of the target or of one of its drafts; ValueError for any other name."""
    if name not in get_args(DemoModel):
        raise ValueError(f'demo model {name!r}: choose one of {", ".join(get_args(DemoModel))}')
    return Path(str(files('specdec.demo'))) / 'models' / name
