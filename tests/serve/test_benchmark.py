"""The load generator against a real server: its counts are the server's."""

import csv
import json

import pytest

from benchmark.profile_restful_api import main, percentile, read_prompts
from specdec.errors import ConfigError


def test_a_round_against_the_demo(demo_server, tmp_path, capsys):
    prompts = tmp_path / 'prompts.jsonl'
    lines = ['def f(x):', {'prompt': 'import os\n'}, {'messages': [{'role': 'user', 'content': 'class A:'}]}]
    prompts.write_text('\n'.join(map(json.dumps, lines)))
    main(
        [demo_server.url, '--prompts', str(prompts), '--concurrency', '1', '3', '--num-requests', '6', '--max-tokens',
         '12', '--ignore-eos', '--request-rate', '200', '--output', str(tmp_path / 'out')]
    )  # fmt: skip
    assert 'tokens_per_s' in capsys.readouterr().out
    report = json.loads((tmp_path / 'out' / 'summary.json').read_text())
    assert [row['concurrency'] for row in report['rounds']] == [1, 3]
    for row in report['rounds']:
        assert (row['errors'], row['completion_tokens'], row['server_generated_tokens']) == (0, 72, 72)
        assert row['prompt_tokens'] == row['server_prompt_tokens']
        assert row['mean_accepted_length'] >= 1
        assert row['first_token_ms_p50'] <= row['first_token_ms_p99'] <= row['request_ms_p99']
    with (tmp_path / 'out' / 'summary.csv').open() as file:
        assert len(list(csv.DictReader(file))) == 2
    assert (tmp_path / 'out' / 'summary.png').read_bytes().startswith(b'\x89PNG')


def test_errors_are_counted(demo_server, tmp_path, capsys):
    out = ['--output', str(tmp_path / 'out')]
    main([demo_server.url, '--num-requests', '2', '--concurrency', '2', '--temperature', '9', *out])
    assert json.loads((tmp_path / 'out' / 'summary.json').read_text())['rounds'][0]['errors'] == 2
    assert 'temperature' in capsys.readouterr().err


def test_percentiles():
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentile([5.0], 99) == 5.0
    assert percentile([], 50) != percentile([], 50), 'nan'


def test_text_files_have_a_prompt_a_line(tmp_path):
    (tmp_path / 'prompts.txt').write_text('one\n\ntwo\n')
    assert [conversation[0]['content'] for conversation in read_prompts(tmp_path / 'prompts.txt')] == ['one', 'two']
    assert len(read_prompts(None)) > 3
    with pytest.raises(ConfigError, match='not readable'):
        read_prompts(tmp_path / 'none.txt')
