"""DFlash: every proposal of the block at once, each the most likely token of its row."""

from specdec.kernels.pick import argmax
from specdec.spec_decode.proposers.base import DraftStep, Proposal
from specdec.spec_decode.proposers.block import BlockProposer


class DFlashProposer(BlockProposer):
    def propose(self, step: DraftStep) -> Proposal:
        logits = self.draft.logits(self.proposal_rows(self.block(step)))
        return Proposal(self.draft.target_ids(argmax(logits)), None)
