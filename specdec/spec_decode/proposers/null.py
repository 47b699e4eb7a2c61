"""No speculation, as a proposer: no taps, no drafts, the same path through the engine."""

from specdec.layers.cache_specs import CacheSpec
from specdec.spec_decode.proposers.base import DraftStep, Proposal


class NullProposer:
    taps: tuple[int, ...] = ()
    num_drafts = 0
    has_confidence = False

    def cache_spec(self) -> CacheSpec | None:
        return None

    def absorb(self, step: DraftStep) -> None:
        """There is nothing to remember."""

    def propose(self, step: DraftStep) -> Proposal:
        tokens = step.anchors.new_zeros(step.anchors.shape[0], 0)
        return Proposal(tokens, None)
