"""DSpark: the block in parallel, then its tokens left to right through the Markov head, with a confidence for each."""

from torch import Tensor

from specdec.spec_decode.proposers.base import DraftStep, Proposal
from specdec.spec_decode.proposers.block import BlockProposer
from specdec.spec_decode.proposers.draws import chain_draws


class DSparkProposer(BlockProposer):
    """Both heads are the checkpoint's choice: rank 0 leaves out the chain, and the confidence head may be absent."""

    def propose(self, step: DraftStep) -> Proposal:
        hidden = self.block(step)
        rows = self.proposal_rows(hidden)
        logits = self.draft.logits(rows)
        if self.draft.markov is None:
            return self.independent(logits, step, self._survival(rows, None))
        lead = hidden[:, 0] if self.first_row else None
        draws, kept = chain_draws(step.sampling, step.lengths, logits)
        tokens, previous = self.draft.markov.chain(logits, rows, lead, step.anchors, draws=draws)
        survival = self._survival(rows, self.draft.markov.embed(previous))
        return Proposal(tokens, survival, None if kept is None else self.q(kept, step))

    def _survival(self, rows: Tensor, embeddings: Tensor | None) -> Tensor | None:
        """The chance that drafts 1..k are all accepted [P, K]: rows [P, K, H] and the preceding tokens' embeddings."""
        confidence = self.draft.confidence
        return None if confidence is None else confidence.survival(rows, embeddings)
