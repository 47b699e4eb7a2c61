import dataclasses
import io

import pytest
from rich.console import Console

from specdec import GenerationConfig, Pipeline, Response
from specdec.cli.chat import answer, converse, messages, summary
from specdec.engine.tokenizer import Tokenizer
from specdec.messages import SpeculationStats
from tests.helpers.fake_engine import DEFAULT_INFO, FakeEngine, in_steps
from tests.helpers.tokenizers import byte_level_folder


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
    return Tokenizer.load(byte_level_folder(tmp_path_factory.mktemp('tokenizer')))


def talk(tokenizer, typed: str, script, info=DEFAULT_INFO) -> tuple[str, FakeEngine]:
    console, engine = Console(file=io.StringIO(), highlight=False, width=200), FakeEngine(script, info)
    with Pipeline.from_engine(engine, tokenizer) as pipe:
        converse(pipe, GenerationConfig(do_sample=True, max_new_tokens=4096), console, io.StringIO(typed))
    return console.file.getvalue(), engine


def test_conversation(tokenizer):
    reply = tokenizer.encode('fine, [bold]thanks[/bold] 你好')
    shown, engine = talk(tokenizer, 'how are\nyou?\n\nand now?\n\nend\nagain\n\n', lambda _: in_steps(reply, 3))
    assert shown.count('fine, [bold]thanks[/bold] 你好') == 3
    prompts = [tokenizer.decode(r.prompt_ids, skip_special_tokens=False) for r in engine.requests.values()]
    assert '<|im_start|>user\nhow are\nyou?<|im_end|>' in prompts[0]
    assert prompts[1].startswith(prompts[0])
    assert prompts[2] == '<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n'
    assert 'forgotten' in shown
    assert 'mean accepted length 2.' in shown or 'mean accepted length 3.' in shown


def test_exit_leaves(tokenizer):
    _, engine = talk(tokenizer, 'exit\nnever asked\n\n', lambda _: [[1]])
    assert engine.requests == {}


def test_errors_and_images_do_not_end_the_conversation(tokenizer):
    shown, engine = talk(tokenizer, '/image a.png\n\n' + 'long ' * 300 + '\n\nhi\n\n', lambda _: [[1]])
    assert 'Images cannot be served' in shown
    assert 'error: prompt=' in shown
    assert len(engine.requests) == 1


def test_control_c_stops_the_answer_only(tokenizer):
    class InterruptedConsole(Console):
        def print(self, *objects, **options):
            if objects == ('!',):
                raise KeyboardInterrupt
            super().print(*objects, **options)

    console = InterruptedConsole(file=io.StringIO(), highlight=False)
    info = dataclasses.replace(DEFAULT_INFO, session_len=10**6)
    mark = tokenizer.encode('!')
    engine = FakeEngine(lambda _: [mark] * 100_000, info)
    with Pipeline.from_engine(engine, tokenizer) as pipe:
        session = pipe.session()
        answer(pipe, session, 'hi', GenerationConfig(max_new_tokens=None), console)
        assert session.history == []
    assert engine.aborted == [1]
    assert '[stopped: ' in console.file.getvalue()


def test_messages_end_with_an_empty_line_or_the_input():
    console = Console(file=io.StringIO())
    typed = ['\n', '  a\n', 'b\n', '\n', 'exit\n', '   \n', '\n', 'last']
    assert list(messages(typed, console)) == ['  a\nb', 'exit', 'last']


def test_summary():
    response = Response(generate_token_len=10, finish_reason='length', speculation=SpeculationStats(4, 12, 5))
    assert summary(response, 2.0) == '[length: 10 tokens, 5.0 tokens/s, mean accepted length 2.25]'
    assert summary(Response(finish_reason='error', error_message='x=1: no'), 1.0) == 'error: x=1: no'
