import subprocess
import sys

import pytest

from specdec.cli.main import COMMANDS, main, normalised
from specdec.version import __version__


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a command line, run in this process."""
    with pytest.raises(SystemExit) as raised:
        main(list(arguments))
    captured = capsys.readouterr()
    return raised.value.code or 0, captured.out, captured.err


@pytest.mark.parametrize('flag', ['--version', '-v'])
def test_version(capsys, flag):
    assert run(capsys, flag) == (0, __version__ + '\n', '')


def test_help_lists_every_command_and_loads_no_torch():
    code = (
        'import sys\nfrom specdec.cli.main import main\n'
        'try: main(["--help"])\nfinally: assert "torch" not in sys.modules\n'
    )
    result = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    for name in COMMANDS:
        assert f' {name} ' in result.stdout


@pytest.mark.parametrize('name', COMMANDS)
def test_every_command_has_help(capsys, name):
    code, out, _ = run(capsys, name, '--help')
    assert code == 0
    assert f'Usage: specdec {name}' in out


@pytest.mark.parametrize(
    'arguments', [('nope',), ('chat',), ('chat', 'x', '--no-such-flag'), ('demo', '--tokens', '0')]
)
def test_wrong_usage_has_status_2(capsys, arguments):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert 'Traceback' not in err


@pytest.mark.parametrize(
    ('arguments', 'error'),
    [
        (('--backend', 'turbomind'), "error: backend='turbomind': only 'pytorch' is served here"),
        (('--tp', '0'), 'error: tp=0: '),
        (('--quant-policy', 'int8'), "error: quant_policy='int8': "),
        (('--adapters', 'lora'), "error: adapters=['lora']: "),
        (('--language-model-only',), 'error: language_model_only=True: '),
        (
            ('--speculative-num-draft-tokens', '3'),
            'error: speculative_num_draft_tokens=3: needs --speculative-algorithm',
        ),
        (('--speculative-algorithm', 'eagle'), "error: method='eagle': must be one of 'dflash', 'dspark'"),
        (('--speculative_algorithm=dspark', '--speculative_dflash_block_size=4'), 'error: dflash_block_size=4: '),
        (('--max-new-tokens', '0'), 'error: max_new_tokens=0: must be at least 1'),
        ((), "error: model='/no/such/model': "),
    ],
    ids=str,
)
def test_bad_settings_are_one_line_and_status_1(capsys, arguments, error):
    code, out, err = run(capsys, 'chat', '/no/such/model', *arguments)
    assert (code, out) == (1, '')
    assert err.startswith(error)
    assert err.count('\n') == 1


def test_underscores_are_dashes():
    assert normalised(['check-env', '--dump_file=a_b', '--x_y', 'v_w']) == [
        'check_env',
        '--dump-file=a_b',
        '--x-y',
        'v_w',
    ]
