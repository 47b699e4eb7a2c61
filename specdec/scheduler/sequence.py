"""One request as the host sees it: its tokens, how far they are committed, and what it holds. Next: scheduler.py."""

from dataclasses import dataclass, field

from specdec.messages import EngineRequest
from specdec.plan import NO_STAGE, Stage
from specdec.scheduler.pages import ROOT


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` are prompt and output; `prefill_end` of them go through prompt chunks (all of them after a preemption).

    `launched`: prompt tokens whose rows were launched. `length`: committed tokens, as last read while decoding.
    `branch`: where its prompt's first pages were cached without the state that goes with them; a chunk ends there.
    `steps_in_flight`: decode steps launched and not read yet. `has_drafts`: the last launched step drafts for it;
    `survival`: of the latest block that was read. `published` pages are findable by others; `key_id` names
    the prefix that they spell. Slot 0: it waits and holds nothing.
    """

    request: EngineRequest
    end: int
    max_drafts: int
    stages: Stage = NO_STAGE
    tokens: list[int] = field(default_factory=list)
    slot: int = 0
    pages: list[int] = field(default_factory=list)
    prefill_end: int = 0
    launched: int = 0
    branch: int = 0
    length: int = 0
    steps_in_flight: int = 0
    has_drafts: bool = False
    survival: tuple[float, ...] | None = None
    published: int = 0
    key_id: int = ROOT
    cached_tokens: int | None = None
    finished: bool = False

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def prefilling(self) -> bool:
        return self.launched < self.prefill_end

    @property
    def computes_prompt(self) -> bool:
        """Its own prompt has not been through the target yet."""
        return len(self.tokens) == self.prompt_length and (not self.slot or self.prefilling)
