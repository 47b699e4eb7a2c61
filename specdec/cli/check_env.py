"""`specdec check_env`: what a bug report should say about the machine. Works without a GPU, and with packages missing.

Next: main.py, where the command is registered.
"""

import json
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from specdec.errors import ConfigError
from specdec.version import __version__

PACKAGES = (
    'torch', 'triton', 'transformers', 'tokenizers', 'safetensors', 'huggingface-hub', 'numpy', 'jinja2', 'typer',
    'rich', 'fastapi', 'pydantic', 'uvicorn', 'xgrammar', 'flash-linear-attention', 'lmdeploy',
)  # fmt: skip
NOT_FOUND = 'not installed'
OTHER_PACKAGE = (
    "warning: the distribution 'specdec' on PyPI is another project with the same import name; "
    "remove it with 'pip uninstall specdec', then install specdec-serve again"
)


def check_env(
    dump_file: Annotated[
        Path | None, typer.Option(metavar='FILE.{json,yml}', help='Also write the report to this file.')
    ] = None,
) -> None:
    """Print what a bug report should say about this machine: versions, devices, compiler."""
    if dump_file is not None and dump_file.suffix not in ('.json', '.yml', '.yaml'):
        raise ConfigError('dump_file', str(dump_file), 'must end in .json or .yml')
    report = environment()
    for name, value in report.items():
        typer.echo(f'{name}: {value}')
    if version_of('specdec') != NOT_FOUND:
        typer.echo(OTHER_PACKAGE, err=True)
    if dump_file is not None:
        write_report(report, dump_file)


def environment() -> dict[str, str]:
    return {
        'platform': platform.platform(),
        'CPU': f'{_cpu_name()}, {_num_cpus()} usable cores',
        'Python': sys.version.replace('\n', ' '),
        'specdec': __version__ + _git_commit(),
        **{name: version_of(name) for name in PACKAGES},
        **_torch_facts(),
        'compiler': _first_line('gcc', '--version'),
        'nvcc': _last_line('nvcc', '--version'),
        'NVIDIA driver': _first_line('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader'),
        'GPU topology': _output('nvidia-smi', 'topo', '-m'),
    }


def version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return NOT_FOUND


def write_report(report: dict[str, str], file: Path) -> None:
    """JSON, or YAML whose values are quoted as JSON quotes them."""
    if file.suffix == '.json':
        text = json.dumps(report, indent=2, ensure_ascii=False) + '\n'
    else:
        text = ''.join(f'{json.dumps(name)}: {json.dumps(value)}\n' for name, value in report.items())
    try:
        file.write_text(text, encoding='utf-8')
    except OSError as error:
        raise ConfigError('dump_file', str(file), f'cannot be written ({error.strerror})') from error


def _torch_facts() -> dict[str, str]:
    try:
        import torch
    except ImportError as error:
        return {'PyTorch': f'cannot be imported ({error})'}
    facts = {
        'PyTorch CUDA': torch.version.cuda or 'built for CPU',
        'PyTorch threads': str(torch.get_num_threads()),
        'CUDA available': str(torch.cuda.is_available()),
    }
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            gibibytes, capability = device.total_memory / 2**30, f'{device.major}.{device.minor}'
            facts[f'GPU {index}'] = f'{device.name}, {gibibytes:.0f} GiB, compute capability {capability}'
    return facts


def _cpu_name() -> str:
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(': ')[2] for line in lines if line.startswith('model name')), platform.machine())


def _num_cpus() -> int:
    import psutil

    return psutil.cpu_count() or 1


def _git_commit() -> str:
    """The checkout's commit, where specdec runs from one."""
    root = Path(__file__).parents[2]
    if not (root / '.git').exists():
        return ''
    commit = _first_line('git', '-C', str(root), 'rev-parse', '--short', 'HEAD')
    return '' if commit == NOT_FOUND else f'+{commit}'


def _first_line(*command: str) -> str:
    return _output(*command).split('\n')[0]


def _last_line(*command: str) -> str:
    return _output(*command).split('\n')[-1]


def _output(*command: str) -> str:
    """What a tool prints; NOT_FOUND if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return NOT_FOUND
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return NOT_FOUND
    return result.stdout.strip() or NOT_FOUND
