"""What `pip install .` installs: every file of the package, its command, its licence."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from specdec.version import __version__

ROOT = Path(__file__).parent.parent
SOURCES = ('specdec', 'pyproject.toml', 'README.md', 'LICENSE', '.gitignore')


@pytest.mark.slow
def test_wheel_has_every_file_of_the_package(tmp_path: Path):
    tree = tmp_path / 'tree'
    tree.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns('__pycache__'))
        else:
            shutil.copy(source, tree / name)
    build = [sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '--no-build-isolation', '-w', str(tmp_path), '.']
    subprocess.run(build, cwd=tree, check=True)
    (wheel,) = tmp_path.glob('*.whl')
    assert wheel.name == f'specdec_serve-{__version__}-py3-none-any.whl'
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f'specdec_serve-{__version__}.dist-info/'
        commands = archive.read(f'{info}entry_points.txt').decode()
        metadata = archive.read(f'{info}METADATA').decode()
    packed = {name for name in names if not name.startswith(info)}
    assert packed == {path.relative_to(tree).as_posix() for path in (tree / 'specdec').rglob('*') if path.is_file()}
    assert f'{info}licenses/LICENSE' in names
    assert re.search(r'^specdec = specdec\.cli\.main:main$', commands, re.M)
    assert re.search(r'^License-Expression: Apache-2\.0$', metadata, re.M)
