"""A model's name into a folder on this machine: an existing folder is itself, anything else comes from the hub.

Only what specdec reads is fetched: JSON, safetensors, tokenizer and chat template files; never code, never a pickle.
Next: checkpoint.py, which reads the folder.
"""

import os
import re
from importlib.resources import files
from pathlib import Path

from specdec.errors import CheckpointError, ConfigError

ALLOWED_FILES = ('*.json', '*.safetensors', '*.jinja', '*.tiktoken', 'tokenizer*', 'merges.txt', 'vocab.txt')
TOKENIZER_FILES = ('tokenizer.json', 'vocab.json', 'tokenizer.model', 'vocab.txt')
IGNORED_FILES = ('*/*', '*.py')  # subfolders hold other formats of the same weights
_HUB_NAME = re.compile(r'[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?')


DEMO = 'demo'


def find_target(name_or_path: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """The folder of a target, which may be the packaged one; ConfigError as `resolve_model`."""
    if name_or_path == DEMO and not os.path.isdir(DEMO):
        return demo_folder('target')
    return resolve_model(name_or_path, revision, download_dir)


def demo_folder(name: str) -> Path:
    """Folder of the packaged demo target or of its draft for a method."""
    return Path(str(files('specdec'))) / 'demo' / 'models' / name


def resolve_model(
    name_or_path: str | os.PathLike[str], revision: str | None = None, download_dir: str | None = None
) -> Path:
    """The folder of a checkpoint; fetched with huggingface_hub (HF_* environment) where it is no folder yet.

    Raises ConfigError if it is neither a folder nor a name that the hub, or its local cache, can serve.
    """
    name = os.fspath(name_or_path)
    path = Path(name).expanduser()
    if name and os.path.isdir(path):
        return path
    if name and os.path.exists(path):
        raise ConfigError('model', name, 'is a file; name the folder that holds config.json')
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError('model', name, 'no such folder; check the path')
    return _fetch(name, revision, download_dir)


def check_has_tokenizer(folder: Path) -> None:
    """CheckpointError if no file of a target's folder can be the vocabulary of a tokenizer."""
    if not any(os.path.isfile(folder / name) for name in TOKENIZER_FILES):
        remedy = 'has no tokenizer.json; add it, and tokenizer_config.json, from where the model comes from'
        raise CheckpointError('tokenizer', str(folder), remedy)


def _fetch(name: str, revision: str | None, download_dir: str | None) -> Path:
    import huggingface_hub  # costs half a second, and folders do not need it

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=list(ALLOWED_FILES),
                ignore_patterns=list(IGNORED_FILES),
            )
        )
    except Exception as error:  # whatever the client or its transport raises means the same here: no checkpoint
        raise ConfigError('model', name, f'no such folder, and the hub says: {_reason(error)}') from error


def _reason(error: Exception) -> str:
    from huggingface_hub import errors

    known: tuple[tuple[type[Exception], str], ...] = (
        (errors.GatedRepoError, 'access is restricted; accept its terms and set HF_TOKEN'),
        (errors.RevisionNotFoundError, 'no such revision; check `revision`'),
        (errors.RepositoryNotFoundError, 'no such repository; check the name, or set HF_TOKEN if it is private'),
        (errors.OfflineModeIsEnabled, 'offline mode is on; unset HF_HUB_OFFLINE or name a local folder'),
        (errors.LocalEntryNotFoundError, 'not reachable and not in the local cache; name a local folder'),
    )
    for kind, reason in known:
        if isinstance(error, kind):
            return reason
    return f'{type(error).__name__}: {next(iter(str(error).strip().splitlines()), "")}'
