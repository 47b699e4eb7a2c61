"""Who tells the scheduler how many drafted rows a step may have, and the simplest answer. Next: scheduler.py."""

from collections.abc import Sequence
from typing import Protocol

from specdec.plan import Candidate, LengthChoice


class LengthPolicy(Protocol):
    """Asked once before every step; told of every result. The adaptive one is spec_decode/draft_budget.py."""

    def choose(self, decodes: Sequence[Candidate], joining: Sequence[Candidate], other_rows: int) -> LengthChoice:
        """`decodes` verify in this step, `joining` end their prompt in it; `other_rows` of prompts share it."""
        ...

    def observe(self, survival: Sequence[float], verified: int, accepted: int) -> None:
        """Of a block with these survivals so many drafts were verified, and so many of those accepted."""
        ...

    def report(self, survival: Sequence[float]) -> None:
        """Survivals of a block just drafted."""
        ...


class EveryDraft:
    """As many rows as there are drafts, and always drafts: lengths are fixed, or the device cuts them by itself."""

    def choose(self, decodes: Sequence[Candidate], joining: Sequence[Candidate], other_rows: int) -> LengthChoice:
        del decodes, joining, other_rows
        return LengthChoice(None, True)

    def observe(self, survival: Sequence[float], verified: int, accepted: int) -> None:
        """Nothing to learn."""

    def report(self, survival: Sequence[float]) -> None:
        """Nothing to learn."""
