"""Pages about the server say what the server is: tables made from the code, links, fields and commands."""

import re
from pathlib import Path

import pytest

from specdec.cli.reference import DOCS, TABLES, filled
from specdec.serve.fields import ACTING, NEUTRAL
from specdec.serve.protocol import ChatRequest, CompletionRequest, GenerateRequest
from specdec.serve.routes import router

ROOT = DOCS.parent.parent
PAGES = [*sorted(DOCS.glob('*.md')), *sorted((DOCS.parent / 'zh_cn').glob('*.md'))]


@pytest.mark.parametrize('page', TABLES)
def test_tables_are_up_to_date(page):
    text = (DOCS / page).read_text()
    assert filled(page, text) == text, 'run python -m specdec.cli.reference'


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.relative_to(DOCS.parent).as_posix())
def test_links_and_paths(page: Path):
    text = page.read_text()
    links = [target for target in re.findall(r'\]\(([^)#]+)', text) if not target.startswith('http')]
    paths = re.findall(r'(?<![\w./-])(?:specdec|tests|docs|benchmark|requirements)/[\w./-]*\w', text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert not missing


def test_every_page_is_in_the_index_of_its_language():
    for folder in ('en', 'zh_cn'):
        index = (DOCS.parent / folder / 'README.md').read_text()
        assert all(
            f']({page.name})' in index for page in PAGES if page.parent.name == folder and page.name != 'README.md'
        )


def test_every_endpoint_is_documented():
    text = (DOCS / 'endpoints.md').read_text()
    assert [route.path for route in router.routes if route.path.replace('{name:path}', '{name}') not in text] == []


def test_every_field_acts_or_is_refused_or_is_the_endpoints_own():
    """No field is read by nobody: what is in no table stands on the page."""
    text = (DOCS / 'endpoints.md').read_text()
    for kind in (ChatRequest, CompletionRequest, GenerateRequest):
        for name in kind.model_fields.keys() - ACTING.keys() - NEUTRAL.keys() - {'model', 'messages', 'prompt'}:
            assert f'`{name}`' in text, name
    assert not ACTING.keys() & NEUTRAL.keys()
