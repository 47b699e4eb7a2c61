"""DFlash: every proposal of the block at once, each from its own row alone."""

from specdec.spec_decode.proposers.base import DraftStep, Proposal
from specdec.spec_decode.proposers.block import BlockProposer


class DFlashProposer(BlockProposer):
    def propose(self, step: DraftStep) -> Proposal:
        logits = self.draft.logits(self.proposal_rows(self.block(step)))
        return self.independent(logits, step)
