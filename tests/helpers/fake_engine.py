"""An engine without a model: emits scripted tokens, several per step, and obeys stop ids and limits as the real one."""

import threading
from collections.abc import Callable, Sequence

from specdec.messages import EngineInfo, EngineRequest, EngineStats, GrammarVocabulary, RequestOutput

Script = Callable[[EngineRequest], Sequence[Sequence[int]]]

DEFAULT_INFO = EngineInfo(
    model_name='fake', folder='', vocab_size=1000, session_len=256, max_batch_size=4, num_drafts=3, eos_ids=()
)


class FakeEngine:
    """`script` gives a request's tokens step by step; the first step is the prompt's own token (no decode step).

    `fail_at`: step() raises at that step number. `gate`: step() waits until it is set. `refuse`: add() raises it.
    """

    def __init__(
        self,
        script: Script,
        info: EngineInfo = DEFAULT_INFO,
        *,
        fail_at: int | None = None,
        gate: threading.Event | None = None,
        refuse: Exception | None = None,
    ) -> None:
        self.info = info
        self.requests: dict[int, EngineRequest] = {}
        self.aborted: list[int] = []
        self.most_in_flight = 0
        self.num_steps = 0
        self.num_finished = 0
        self.closed = False
        self._script, self._fail_at, self._gate, self._refuse = script, fail_at, gate, refuse
        self._live: dict[int, tuple[list[Sequence[int]], int]] = {}

    def add(self, request: EngineRequest) -> None:
        if self._refuse is not None:
            raise self._refuse
        self.requests[request.request_id] = request
        self._live[request.request_id] = (list(self._script(request)), 0)
        self.most_in_flight = max(self.most_in_flight, len(self._live))

    def set_vocabulary(self, vocabulary: GrammarVocabulary) -> None:
        self.vocabulary = vocabulary

    def abort(self, request_ids: Sequence[int]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self._live.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._live)

    def step(self) -> list[RequestOutput]:
        if self._gate is not None:
            self._gate.wait(10)
        self.num_steps += 1
        if self.num_steps == self._fail_at:
            raise RuntimeError('the device is on fire')
        return [self._step_one(request_id) for request_id in list(self._live)]

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._live), num_steps=self.num_steps)

    def close(self) -> None:
        self.closed = True

    def _step_one(self, request_id: int) -> RequestOutput:
        params = self.requests[request_id].params
        steps, num_emitted = self._live[request_id]
        planned = tuple(steps.pop(0))
        ids, finish = [], None
        for token_id in planned:
            ids.append(token_id)
            if token_id in params.stop_ids and num_emitted + len(ids) > params.min_new_tokens:
                finish = 'stop'
            elif num_emitted + len(ids) == params.max_new_tokens:
                finish = 'length'
            if finish:
                break
        if finish is None and not steps:
            finish = 'length'
        if finish:
            self.num_finished += 1
            del self._live[request_id]
        else:
            self._live[request_id] = (steps, num_emitted + len(ids))
        return RequestOutput(
            request_id,
            token_ids=tuple(ids),
            finish_reason=finish,
            decode=num_emitted > 0,
            drafted=self.info.num_drafts if num_emitted > 0 else 0,
            cached_tokens=2,
            logprobs=None if params.logprobs is None else tuple({i: -float(i)} for i in ids),
        )


def in_steps(token_ids: Sequence[int], size: int) -> list[list[int]]:
    """A script for one request: the first token alone, then `size` tokens per step."""
    rest = list(token_ids[1:])
    return [list(token_ids[:1])] + [rest[i : i + size] for i in range(0, len(rest), size)]
