"""What a request's rules go by, one row per slot: counts of ids, recent ids, masks, where reasoning began.

Rows of a block read it together with the drafts in front of them; only emitted tokens are ever noted, so a rejected
draft leaves no trace. agent/state.py fills a slot's rows when a request takes it. Next: logits.py, the reader.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.logit_rules import RuleTables
from specdec.messages import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS
from specdec.plan import Stage

NO_ID = -1  # fills id lists; in the head of a bad word: any id, or none
NO_OUTPUT = -2  # fills recent ids where nothing was emitted yet; equal to nothing
NOT_THINKING = 2**62  # no position is so far behind
HEAD = MAX_BAD_WORD_TOKENS - 1  # ids of a bad word before its last, the latest at the end


@dataclass(frozen=True, slots=True)
class Rules:
    """Tables with a row per slot, int64 unless said otherwise. `tables`: kernels.logit_rules; `word_heads` [S, n, HEAD]
    and `word_ends` [S, n]: bad words, NO_ID where there is none; `recent` [S, HEAD]: the last ids emitted;
    `thinking` [S, 3]: budget, opening and closing id; `think_starts` [S]: position of the open section's first token.
    """

    tables: RuleTables
    word_heads: Tensor
    word_ends: Tensor
    recent: Tensor
    thinking: Tensor
    think_starts: Tensor

    @classmethod
    def allocate(cls, num_slots: int, num_drafts: int, vocabulary: int, device: torch.device) -> 'Rules':
        def full(value: float, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((num_slots, *shape), value, dtype=dtype, device=device)

        tables = RuleTables(
            counts=full(0, vocabulary, dtype=torch.int32),
            penalties=full(0, 3, dtype=torch.float32).index_fill_(1, torch.tensor([0], device=device), 1),
            bias_ids=full(0, MAX_LOGIT_BIAS),
            bias_values=full(0, MAX_LOGIT_BIAS, dtype=torch.float32),
            num_bias=full(0),
            masks=full(-1, num_drafts + 1, -(-vocabulary // 32), dtype=torch.int32),
        )
        return cls(
            tables=tables,
            word_heads=full(NO_ID, MAX_BAD_WORDS, HEAD),
            word_ends=full(NO_ID, MAX_BAD_WORDS),
            recent=full(NO_OUTPUT, HEAD),
            thinking=full(NO_ID, 3),
            think_starts=full(NOT_THINKING),
        )

    @staticmethod
    def bytes_for(num_slots: int, num_drafts: int, vocabulary: int) -> int:
        """What the tables that grow with the vocabulary take."""
        return num_slots * 4 * (vocabulary + (num_drafts + 1) * -(-vocabulary // 32))

    # ------------------------------------------------------------------------------------------------- for a row
    def word_bans(self, slots: Tensor, drafts: Tensor, requests: Tensor, steps: Tensor) -> Tensor:
        """Ids that would complete a bad word [R, n], NO_ID elsewhere; arguments as in RuleRows."""
        output = torch.cat([self.recent[slots], drafts], 1)
        window = steps[:, None] + torch.arange(HEAD, device=steps.device)
        heads, ends = self.word_heads[slots], self.word_ends[slots]
        recent = output[requests[:, None], window][:, None, :]
        same = (heads[requests] == recent) | (heads[requests] == NO_ID)
        return torch.where(same.all(-1), ends[requests], NO_ID)

    def forced_ids(
        self, slots: Tensor, drafts: Tensor, requests: Tensor, steps: Tensor, draw_positions: Tensor
    ) -> Tensor:
        """The closing id on rows where the thinking budget is used up [R], NO_ID elsewhere."""
        budget, _, closing = self.thinking[slots].unbind(1)
        first = draw_positions - steps  # of the request: where its first row draws
        starts = self._starts_behind(slots[requests], drafts[requests], steps, first)
        reached = (budget[requests] >= 0) & (draw_positions - starts >= budget[requests])
        return torch.where(reached, closing[requests], NO_ID)

    def _starts_behind(self, slots: Tensor, tokens: Tensor, counts: Tensor, first: Tensor) -> Tensor:
        """Where the section began that is open behind the first counts [n] of tokens [n, k], drawn from first [n]."""
        _, opening, closing = self.thinking[slots].unbind(1)
        step = torch.arange(tokens.shape[1], device=tokens.device)
        closes = tokens == closing[:, None]
        turns = (closes | (tokens == opening[:, None])) & (step < counts[:, None])
        last = torch.where(turns, step + 1, 0).amax(1) if tokens.shape[1] else torch.zeros_like(counts)
        closed = (closes & (step + 1 == last[:, None])).any(1)
        begun = torch.where(closed, NOT_THINKING, first + last)
        return torch.where(last > 0, begun, self.think_starts[slots])

    # ------------------------------------------------------------------------------------------------ what happened
    def note_emitted(self, slots: Tensor, tokens: Tensor, counts: Tensor, first: Tensor, stages: Stage) -> None:
        """The first counts [P] of tokens [P, K + 1] were emitted, drawn at positions from `first` [P] on."""
        tokens = tokens.clamp(min=0)
        if Stage.PENALTIES in stages:
            emitted = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
            vocabulary = self.tables.counts.shape[1]
            places = slots[:, None] * vocabulary + tokens
            self.tables.counts.view(-1).scatter_add_(0, places.flatten(), (2 * emitted).int().flatten())
        if Stage.WORDS in stages:
            output = torch.cat([self.recent[slots], tokens], 1)
            window = counts[:, None] + torch.arange(HEAD, device=counts.device)
            self.recent.index_copy_(0, slots, output.gather(1, window))
        if Stage.THINKING in stages:
            self.think_starts.index_copy_(0, slots, self._starts_behind(slots, tokens, counts, first))
