import dataclasses
import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from specdec import EngineError, GenerationConfig, Pipeline
from specdec.cli import demo as module
from specdec.cli.main import main
from specdec.engine.tokenizer import Tokenizer
from tests.helpers.fake_engine import DEFAULT_INFO, FakeEngine, in_steps
from tests.helpers.tokenizers import byte_level_folder

TEXT = 'def main(argument):\n    return argument + 1\n'
PROMPTS = [SimpleNamespace(name=f'module.py:{i}', text=f'def f{i}(argument):') for i in range(5)]
CONFIG = GenerationConfig(max_new_tokens=16)


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
    return Tokenizer.load(byte_level_folder(tmp_path_factory.mktemp('tokenizer')))


@pytest.fixture
def fake_methods(monkeypatch, tokenizer):
    """Methods that emit 1, 2 and 4 tokens a step; DSpark's output differs if `differs` is set."""
    state = SimpleNamespace(differs=False, order=[])

    def open_method(method, _):
        size = {'plain': 1, 'dflash': 2, 'dspark': 4}[method]
        ids = tokenizer.encode(TEXT * 20)
        info = dataclasses.replace(DEFAULT_INFO, num_drafts=size - 1)

        def script(_):
            state.order.append(method)
            return in_steps(ids[::-1] if state.differs and method == 'dspark' else ids, size)

        return Pipeline.from_engine(FakeEngine(script, info), tokenizer)

    monkeypatch.setattr(module, 'open_method', open_method)
    monkeypatch.setattr(module, 'held_out_prompts', lambda: PROMPTS)
    return state


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as raised:
        main(['demo', *arguments])
    return raised.value.code or 0


def test_json_alone_on_stdout(fake_methods, capsys):
    assert run('--json', '-', '--tokens', '21', '--prompts', '3') == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert [entry['method'] for entry in report['methods']] == ['plain', 'dflash', 'dspark']
    assert [entry['mean_accepted_length'] for entry in report['methods']] == [1.0, 2.0, 4.0]
    assert all(entry['tokens_per_s'] > 0 and entry['identical'] is True for entry in report['methods'])
    assert 'plain decoding' in captured.err
    assert fake_methods.order == ['plain', 'dflash', 'dspark'] * 5  # streamed, warm-up, three rounds


def test_table_and_file(fake_methods, capsys, tmp_path):
    fake_methods.differs = True
    assert run('--json', str(tmp_path / 'figures.json'), '--tokens', '10', '--prompts', '5', '--batch', '2') == 0
    out = capsys.readouterr().out
    assert 'module.py:0' in out
    assert out.count('def main(argument):') >= 2
    assert '\x1b[' not in out
    report = json.loads((tmp_path / 'figures.json').read_text())
    assert [entry['identical'] for entry in report['methods']] == [True, True, False]


@pytest.mark.usefixtures('fake_methods')
def test_bad_arguments(capsys, tmp_path):
    assert run('--prompts', '6') == 1
    assert capsys.readouterr().err == ('error: prompts=6: there are 5 held-out prompts; ask for at most so many\n')
    assert run('--json', str(tmp_path / 'none' / 'x.json'), '--prompts', '1', '--tokens', '2') == 1
    assert capsys.readouterr().err.count('\n') == 1
    assert run('--device', 'tpu', '--prompts', '1') == 1
    assert capsys.readouterr().err.startswith("error: device_type='tpu': ")


def test_accepted_tokens_are_coloured(tokenizer):
    ids = tokenizer.encode('😀 return 🎉 argument')
    console = Console(file=io.StringIO(), force_terminal=True, color_system='standard', width=200, highlight=False)
    with Pipeline.from_engine(FakeEngine(lambda _: in_steps(ids, 3)), tokenizer) as pipe:
        module.stream_one(pipe, 'x', CONFIG, console)
    shown = console.file.getvalue()
    assert '\x1b[1;32m' in shown
    plain = io.StringIO()
    with Pipeline.from_engine(FakeEngine(lambda _: in_steps(ids, 3)), tokenizer) as pipe:
        response = module.stream_one(pipe, 'x', CONFIG, Console(file=plain))
    assert plain.getvalue() == response.text == tokenizer.decode(ids)


def test_scores():
    plain, fast = module.Score('plain', rates=[10.0, 20.0, 30.0]), module.Score('dspark', rates=[20.0, 30.0, 30.0])
    assert (fast.tokens_per_s, fast.ratio_to(plain)) == (30.0, 1.5)


def test_errors_end_the_demo(tokenizer):
    with (
        Pipeline.from_engine(FakeEngine(lambda _: [[1]] * 9, fail_at=1), tokenizer) as pipe,
        pytest.raises(EngineError, match='on fire'),
    ):
        module.run_round(pipe, ['x'], CONFIG)
