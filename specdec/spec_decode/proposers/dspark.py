"""DSpark: the block in parallel, then its tokens left to right through the Markov head, with a confidence for each."""

from specdec.models.draft.block_draft import BlockDraft
from specdec.models.draft.heads import MarkovHead
from specdec.spec_decode.proposers.base import DraftStep, Proposal
from specdec.spec_decode.proposers.block import BlockProposer


class DSparkProposer(BlockProposer):
    def __init__(self, draft: BlockDraft, num_drafts: int) -> None:
        super().__init__(draft, num_drafts)
        assert draft.markov is not None, 'a DSpark draft has a Markov head'
        self.markov: MarkovHead = draft.markov

    def propose(self, step: DraftStep) -> Proposal:
        hidden = self.block(step)
        rows = self.proposal_rows(hidden)
        lead = hidden[:, 0] if self.first_row else None
        tokens, previous = self.markov.chain(self.draft.logits(rows), rows, lead, step.anchors)
        confidence = self.draft.confidence
        if confidence is None:
            return Proposal(tokens, None)
        embeddings = self.markov.embed(previous) if confidence.with_markov else None
        return Proposal(tokens, confidence.logits(rows, embeddings).sigmoid().cumprod(-1))
