"""Prose that code can contradict: paths, commands, field names and packages that the documentation mentions."""

import dataclasses
import importlib.util
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import specdec

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted((ROOT / 'docs').glob('*.md'))]
PATH = re.compile(r'(?<![\w./-])(?:specdec|tests|docs|benchmark|requirements|\.ci)/[\w./-]*\w/?')
FOLDERS = ('specdec', 'tests', 'docs', 'benchmark', 'requirements', '.ci')
TEXT = {'.md', '.py', '.txt', '.toml', '.yaml', ''}


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def readme_command(name: str) -> str:
    blocks = re.findall(rf'^<!-- {name} -->\n```bash\n(.*?)\n```$', (ROOT / 'README.md').read_text(), re.M | re.S)
    assert len(blocks) == 1, f'README.md marks {len(blocks)} blocks as {name}'
    return blocks[0]


@pytest.mark.parametrize('page', PAGES, ids=page_id)
def test_paths_exist(page: Path):
    missing = {path for path in PATH.findall(page.read_text()) if not (ROOT / path).exists()}
    assert not missing


@pytest.mark.parametrize('page', PAGES, ids=page_id)
def test_links_resolve(page: Path):
    for target in re.findall(r'\]\(([^)\s]+)\)', page.read_text()):
        if target.startswith('https://'):
            continue
        name, _, heading = target.partition('#')
        linked = page.parent / name if name else page
        assert linked.exists(), target
        if heading:
            titles = re.findall(r'^#+ (.*)$', linked.read_text(), re.M)
            assert heading in [re.sub(r'[^\w -]', '', title).lower().replace(' ', '-') for title in titles], target


@pytest.mark.parametrize('page', PAGES, ids=page_id)
def test_modules_exist(page: Path):
    for name in re.findall(r'python -m (specdec[\w.]+)', page.read_text()):
        assert importlib.util.find_spec(name) is not None, name


def test_every_page_is_in_the_index():
    index = (ROOT / 'docs' / 'README.md').read_text()
    assert [page.name for page in PAGES if page.parent.name == 'docs' and f']({page.name})' not in index] == [
        'README.md'
    ]


def test_sources_mention_pages_that_exist():
    missing = {
        (path.relative_to(ROOT).as_posix(), page)
        for path in (ROOT / 'specdec').rglob('*.py')
        for page in re.findall(r'docs/\w+\.md', path.read_text())
        if not (ROOT / page).exists()
    }
    assert not missing


def test_readme_commands_are_those_that_ci_runs():
    script = (ROOT / '.ci' / 'run').read_text()
    for name, wanted in (('demo', 'specdec demo'), ('test', 'python -m pytest')):
        command = readme_command(name)
        assert '\n' not in command
        assert command.endswith(wanted)
        assert f'readme_command {name}' in script
        files = [value for option, value in pairwise(shlex.split(command)) if option in ('-c', '-r')]
        assert files
        assert all((ROOT / value).is_file() for value in files), files


def test_requirements_are_constrained():
    constrained = set(re.findall(r'^([\w-]+)==', (ROOT / 'requirements' / 'constraints.txt').read_text(), re.M))
    asked = re.findall(r'^"?([\w-]+)>=', (ROOT / 'pyproject.toml').read_text().replace('    "', '"'), re.M)
    for name in ('test.txt', 'lint.txt'):
        asked += re.findall(r'^([\w-]+)', (ROOT / 'requirements' / name).read_text(), re.M)
    assert len(asked) > 10
    assert not set(asked) - constrained


@pytest.mark.skipif(importlib.util.find_spec('specdec.cli.main') is None, reason='the commands are not there yet')
def test_help_has_the_commands_that_readme_has():
    documented = set(re.findall(r'^\| `specdec (\w+)', (ROOT / 'README.md').read_text(), re.M))
    assert documented
    shown = subprocess.run(
        [sys.executable, '-c', 'from specdec.cli.main import main; main()', '--help'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert not {name for name in documented if not re.search(rf'\b{name}\b', shown)}


@pytest.mark.parametrize('name', ['PytorchEngineConfig', 'SpeculativeConfig', 'GenerationConfig', 'ChatTemplateConfig'])
def test_compatibility_lists_every_field_once(name: str):
    sections = re.split(r'^## ', (ROOT / 'docs' / 'compatibility.md').read_text(), flags=re.M)
    (section,) = [text for text in sections if text.startswith(f'{name}\n')]
    listed = re.findall(r'`(\w+)`', '\n'.join(line.split('|')[1] for line in section.splitlines() if line[:1] == '|'))
    assert sorted(listed) == sorted(field.name for field in dataclasses.fields(vars(specdec)[name]))


def test_nobody_is_told_to_install_the_other_package():
    phrase = re.compile(r'pip install (?:-\S+ )*specdec' + r'(?!-serve)\b')
    texts = [*ROOT.glob('*.md'), ROOT / 'pyproject.toml']
    texts += [path for folder in FOLDERS for path in (ROOT / folder).rglob('*') if path.suffix in TEXT]
    found = [
        path.relative_to(ROOT).as_posix()
        for path in texts
        if path.is_file() and '__pycache__' not in path.parts and phrase.search(path.read_text(encoding='utf-8'))
    ]
    assert not found
