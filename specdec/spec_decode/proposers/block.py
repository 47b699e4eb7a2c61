"""What DFlash and DSpark share: absorbing context, and running the block as trained whatever K is used of it."""

from torch import Tensor

from specdec.layers.cache_specs import PagedSpec
from specdec.models.draft.block_draft import BlockDraft
from specdec.spec_decode.proposers.base import DraftStep, Proposal
from specdec.spec_decode.proposers.draws import distributions, draw_rows


class BlockProposer:
    """K = `num_drafts` of the draft's g proposals are used; the other rows run too, for the block is bidirectional."""

    def __init__(self, draft: BlockDraft, num_drafts: int) -> None:
        self.draft, self.num_drafts = draft, num_drafts
        self.taps = draft.config.taps
        self.has_confidence = draft.confidence is not None
        self.first_row = 0 if draft.config.anchor_predicts else 1

    def cache_spec(self) -> PagedSpec | None:
        return self.draft.cache_spec()

    def absorb(self, step: DraftStep) -> None:
        self.draft.absorb(step.taps, step.positions, step.entries, step.cache)

    def block(self, step: DraftStep) -> Tensor:
        """All rows of the block [P, b, H], final-normed."""
        return self.draft.block(step.anchors, step.lengths, step.page_table, step.page_size, step.cache)

    def proposal_rows(self, hidden: Tensor) -> Tensor:
        """The rows that propose drafts 1..K [P, K, H]."""
        return hidden[:, self.first_row : self.first_row + self.num_drafts]

    def independent(self, logits: Tensor, step: DraftStep, survival: Tensor | None = None) -> Proposal:
        """Every token drawn by itself from logits [P, K, Vd]."""
        tokens = draw_rows(logits, step.sampling, step.lengths, self.draft.column_ids)
        return Proposal(self.draft.target_ids(tokens), survival, self.q(logits, step))

    def q(self, logits: Tensor, step: DraftStep) -> Tensor | None:
        """What tokens were drawn from, if somebody will ask."""
        if step.sampling is None or not step.sampling.keeps:
            return None
        return distributions(logits, step.sampling, self.draft.column_ids, self.draft.config.decoder.vocab_size)
