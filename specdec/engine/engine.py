"""The engine's loop body: schedule a step, run it, commit what came of it.

Requests and outputs are messages; which thread or process calls `step` is the client's affair (client.py). Next:
scheduler/scheduler.py, then agent/model_agent.py.
"""

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from specdec.agent.caches import MemoryPlan
from specdec.agent.model_agent import Launched, ModelAgent
from specdec.engine.checks import check_request
from specdec.engine.grammar import GrammarGuides
from specdec.errors import RequestError
from specdec.messages import EngineInfo, EngineRequest, EngineStats, GrammarVocabulary, RequestOutput
from specdec.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from specdec.engine.distributed import Ranks


def salted(seed: int, request_id: int) -> int:
    """A seed of the request's own: both numbers mixed by SplitMix64's finaliser."""
    mixed = (seed + 0x9E3779B97F4A7C15 * (request_id + 1)) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return mixed ^ mixed >> 31


class Engine:
    """One target, one proposer, one scheduler. Not thread-safe: one caller drives it."""

    def __init__(
        self,
        info: EngineInfo,
        memory: MemoryPlan,
        scheduler: Scheduler,
        agent: ModelAgent,
        guides: GrammarGuides,
        ranks: 'Ranks | None' = None,
    ) -> None:
        self.info, self.memory, self.ranks = info, memory, ranks
        self.scheduler, self.agent, self.guides = scheduler, agent, guides
        self._launched: deque[Launched] = deque()

    def add(self, request: EngineRequest) -> None:
        """Queue a request. RequestError if this model can never serve it."""
        check_request(self.info, request)
        params = request.params
        if self.scheduler.knows(request.request_id):
            raise RequestError('request_id', request.request_id, 'is in use; give every request an id of its own')
        if params.grammar is not None:
            self.guides.prepare(params.grammar)
        if self.info.verify_length == 'adaptive' and params.draft_sampling == 'probabilistic':
            # whether a draft is verified then depends on the whole batch, so no two requests may share noise
            request = replace(request, params=replace(params, seed=salted(params.seed, request.request_id)))
        self.scheduler.add(request)

    def set_vocabulary(self, vocabulary: GrammarVocabulary) -> None:
        """What grammars must know of the tokenizer; before the first request that has one."""
        if self.ranks is not None:
            self.ranks.tell(vocabulary)
        self.guides.set_vocabulary(vocabulary.data)

    def abort(self, request_ids: Iterable[int]) -> None:
        self.scheduler.abort(request_ids)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> list[RequestOutput]:
        """Launch the next step, if there is one, and return what the oldest unread one gave.

        With overlap the device works on one step while the host commits the one before and prepares the one after.
        EngineError if a rank has died.
        """
        if self.ranks is None:
            return self._step()
        try:
            return self._step()
        except RuntimeError as error:
            raise self.ranks.explain(error) from error

    def _step(self) -> list[RequestOutput]:
        plan = self.scheduler.schedule()
        if plan is not None:
            self._launched.append(self.agent.launch(plan))
            if len(self._launched) <= self.scheduler.config.overlap:
                return []
        if not self._launched:
            return []
        outputs = self.scheduler.commit(self.agent.read(self._launched.popleft()))
        if not self.scheduler.has_work():
            self.scheduler.check()
        return outputs

    def stats(self) -> EngineStats:
        stats, cost = self.scheduler.current_stats(), self.agent.cost
        return stats if cost is None else replace(stats, step_cost=json.dumps(cost.describe()))

    def close(self) -> None:
        """Ends the other ranks; its own memory goes with it."""
        if self.ranks is not None:
            self.ranks.close()
