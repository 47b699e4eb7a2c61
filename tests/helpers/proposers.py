"""Drafts made for tests: they know the text, and are right or wrong as told.

They learn what each request's text is as a real draft does, from taps of committed rows kept in the request's pages; so
a page that is stale, shared too early or never absorbed shows as a text that nobody asked for.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.layers.cache_specs import PagedSpec
from specdec.models.target import TargetModel
from specdec.spec_decode.proposers.base import DraftStep, Proposal

Right = Callable[[int], int]  # committed length -> how many drafts are right before the first wrong one


class KnowingProposer:
    """Proposes from the known `texts`: the first right(length) tokens as they are, the others off by one.

    A text that runs out is continued with wrong tokens. A history that begins no known text fails the test, unless not
    `strict`: what is drafted for a request that a stop id has just ended follows no text.
    """

    taps = (-1,)  # the embedding tells which token a row was
    has_confidence = False

    def __init__(
        self, target: TargetModel, num_drafts: int, texts: Sequence[Sequence[int]], right: Right, strict: bool = True
    ) -> None:
        self.num_drafts, self.right, self.strict = num_drafts, right, strict
        self.texts = [list(text) for text in texts]
        self._table, self._vocabulary = target.embedding.weight, target.vocab_size

    def cache_spec(self) -> PagedSpec:
        return PagedSpec('draft', 1, 1, 1, torch.float32)

    def absorb(self, step: DraftStep) -> None:
        distance, ids = torch.cdist(step.taps, self._table, compute_mode='donot_use_mm_for_euclid_dist').min(-1)
        assert float(distance.max()) < 1e-3, 'a tap that is no embedding'
        step.cache.k[0].flatten().index_copy_(0, step.entries, ids.float() + 1)

    def propose(self, step: DraftStep) -> Proposal:
        histories = self.histories(step)
        return Proposal(torch.tensor([self._continue(h) for h in histories]).view(-1, self.num_drafts), None)

    def histories(self, step: DraftStep) -> list[list[int]]:
        """Each drafting request's text as its pages and its anchor have it."""
        stored: Tensor = step.cache.k[0][step.page_table].flatten(1) - 1
        lengths, anchors = step.lengths.tolist(), step.anchors.tolist()
        return [[*map(int, row[:length].tolist()), anchor] for row, length, anchor in zip(stored, lengths, anchors)]

    def _continue(self, history: list[int]) -> list[int]:
        count, length = self.num_drafts, len(history) - 1
        # with overlap a request that has just ended runs one step more, so its history may go beyond its text
        text = next((t for t in self.texts if t[: len(history)] == history[: len(t)]), None)
        if text is None:
            assert not self.strict, f'no request has the text {history}'
            return [0] * count
        known = text[len(history) : len(history) + count]
        right = min(self.right(length), len(known))
        padded = known + [0] * (count - len(known))
        return padded[:right] + [(token + 1) % self._vocabulary for token in padded[right:]]


def always(count: int) -> Right:
    """Right about `count` tokens every time: 0 is an adversary, K or more an oracle."""
    return lambda _: count


def cycling(pattern: Sequence[int]) -> Right:
    """Right about pattern[length % n] tokens."""
    return lambda length: pattern[length % len(pattern)]


class RandomProposer:
    """Reads nothing and proposes ids that depend on position alone."""

    taps: tuple[int, ...] = ()
    has_confidence = False

    def __init__(self, vocabulary: int, num_drafts: int, seed: int = 0) -> None:
        self.num_drafts = num_drafts
        generator = torch.Generator().manual_seed(seed)
        self._table = torch.randint(0, vocabulary, (4096, num_drafts), generator=generator)

    def cache_spec(self) -> None:
        return None

    def absorb(self, step: DraftStep) -> None:
        """It remembers nothing."""

    def propose(self, step: DraftStep) -> Proposal:
        return Proposal(self._table[(step.lengths + 7 * step.anchors) % len(self._table)], None)
