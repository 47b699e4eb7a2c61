"""DSpark heads bundled in a target's checkpoint: context in rings by slot, the block, the Markov chain, confidence."""

from torch import Tensor

from specdec.layers.cache_specs import CacheSpec
from specdec.models.deepseek_v4.draft import BundledDspark
from specdec.spec_decode.proposers.base import DraftStep, Proposal
from specdec.spec_decode.proposers.draws import chain_draws, distributions


class BundledProposer:
    """K = `num_drafts` of the block's g proposals are used; the other rows run too, for the block is bidirectional."""

    def __init__(self, draft: BundledDspark, num_drafts: int) -> None:
        self.draft, self.num_drafts = draft, num_drafts
        self.taps = draft.draft.taps
        self.has_confidence = draft.draft.has_confidence

    def cache_spec(self) -> CacheSpec | None:
        return self.draft.cache_spec()

    def absorb(self, step: DraftStep) -> None:
        self.draft.absorb(step.taps, step.positions, step.row_offsets, step.slots, step.cache)

    def propose(self, step: DraftStep) -> Proposal:
        slots = step.slots[step.slots.shape[0] - step.anchors.shape[0] :]
        hidden = self.draft.block(step.anchors, step.lengths, slots, step.cache)[:, : self.num_drafts]
        logits = self.draft.logits(hidden)
        draws, kept = chain_draws(step.sampling, step.lengths, logits)
        tokens, previous = self.draft.chain(logits, hidden, step.anchors, draws)
        return Proposal(tokens, self._survival(hidden, previous), self._q(kept, step))

    def _survival(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        acceptance = self.draft.acceptance(hidden, previous)
        return None if acceptance is None else acceptance.cumprod(-1)

    def _q(self, kept: Tensor | None, step: DraftStep) -> Tensor | None:
        if kept is None or step.sampling is None:
            return None
        return distributions(kept, step.sampling, None, kept.shape[-1])
