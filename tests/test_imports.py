"""What importing costs: the public names load nothing heavy, and the core needs none of the server's dependencies."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

CORE = """
import importlib, pkgutil, sys
from importlib.abc import MetaPathFinder

BLOCKED = {'fastapi', 'pydantic', 'starlette', 'uvicorn', 'typer', 'rich', 'xgrammar', 'transformers'}
KERNEL_LANGUAGES = {'triton', 'tilelang'}  # absent without a GPU build of torch; only kernels may miss them

class Block(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in BLOCKED:
            raise ModuleNotFoundError(f'{name} is blocked', name=name)
        return None

sys.meta_path.insert(0, Block())
names = ['specdec', 'specdec.messages', 'specdec.errors', 'specdec.plan', 'specdec.pipeline']
for package in ('kernels', 'layers', 'models', 'spec_decode', 'scheduler', 'agent', 'engine'):
    root = importlib.import_module(f'specdec.{package}')
    names.append(root.__name__)
    names += [module.name for module in pkgutil.walk_packages(root.__path__, root.__name__ + '.')]
for name in set(names) - {'specdec.engine.grammar'}:  # loaded for requests that have a grammar
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not (name.startswith('specdec.kernels.') and error.name in KERNEL_LANGUAGES):
            raise
loaded = BLOCKED & {name.partition('.')[0] for name in sys.modules}
assert not loaded, loaded
print(len(names))
"""

PUBLIC = """
import sys, time
start = time.process_time()
import specdec
spent = time.process_time() - start
heavy = {'torch', 'numpy', 'transformers', 'tokenizers', 'safetensors', 'huggingface_hub', 'jinja2', 'rich', 'typer'}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert all(name in vars(specdec) for name in specdec.__all__)
print(spent)
"""


def run(program: str) -> str:
    finished = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_core_imports_without_the_servers_dependencies():
    assert int(run(CORE)) > 40


def test_public_names_load_nothing_heavy():
    assert min(float(run(PUBLIC)) for _ in range(3)) < 0.3  # seconds of this process, so a busy machine does not count
