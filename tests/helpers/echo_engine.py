"""An engine for servers under test: it repeats its prompt, several tokens a step, or obeys a command in it.

A request's `num_speculative_tokens` says how many tokens beyond the first a step brings. Commands: '!endless' never
ends by itself, '!crash' makes the step fail, '!die' ends the process, '!slow' takes 20 ms a step.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from specdec.engine.tokenizer import Tokenizer
from specdec.messages import EngineInfo, EngineRequest, EngineStats, RequestOutput
from tests.helpers.fake_engine import FakeEngine, in_steps
from tests.helpers.tokenizers import byte_level_folder

TEMPLATE = '{% for m in messages %}{% if m.role == "user" %}{{ m.content }}{% endif %}{% endfor %}'
NUM_DRAFTS = 7


def echo_folder(folder: Path) -> Path:
    """A folder with a tokenizer whose chat template shows user messages alone."""
    byte_level_folder(folder, chat_template=TEMPLATE)
    (folder / 'generation_config.json').write_text('{"eos_token_id": 500, "temperature": 0.5}')
    return folder


class BuildEcho:
    """What the child of a ProcessClient builds."""

    def __init__(self, folder: str, session_len: int = 100_000, max_batch_size: int = 8) -> None:
        self._folder, self._session_len, self._max_batch_size = folder, session_len, max_batch_size

    def __call__(self) -> tuple['EchoEngine', str]:
        tokenizer = Tokenizer.load(self._folder)
        info = EngineInfo(
            model_name='echo',
            folder=self._folder,
            vocab_size=512,
            session_len=self._session_len,
            max_batch_size=self._max_batch_size,
            num_drafts=NUM_DRAFTS,
        )
        return EchoEngine(info, tokenizer), 'no pages'


class EchoEngine(FakeEngine):
    def __init__(self, info: EngineInfo, tokenizer: Tokenizer) -> None:
        super().__init__(self._script_of, info)
        self._tokenizer = tokenizer
        self._seconds = 0.0
        self._pages = 0

    def _script_of(self, request: EngineRequest) -> Sequence[Sequence[int]]:
        text = self._tokenizer.decode(request.prompt_ids)
        self._seconds = 0.02 if text.startswith('!slow') else self._seconds
        if text.startswith('!endless'):
            self._seconds = 0.001
            return [self._tokenizer.encode(' the')[:1]] * 50_000
        drafts = request.params.max_drafts
        return in_steps(request.prompt_ids, 1 + (NUM_DRAFTS if drafts is None else drafts))

    def step(self) -> list[RequestOutput]:
        for request_id in self._live:
            text = self._tokenizer.decode(self.requests[request_id].prompt_ids[:8])
            if text.startswith('!crash'):
                raise RuntimeError('the device is on fire')
            if text.startswith('!die'):
                os._exit(7)
        time.sleep(self._seconds)
        outputs = super().step()
        for output in outputs:
            if output.finish_reason is not None:
                del self.requests[output.request_id]
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._live), num_pages=8, num_pages_held=len(self._live))
