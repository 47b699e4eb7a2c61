"""Where a request's text ends: stop strings, found across token and step boundaries and never shown in part; and texts
that repeat themselves.

The rule does not depend on how tokens are grouped into steps: the stop string that is complete first, in characters,
wins; of those that end at the same character, the longest; a repetition ends the text behind its last token, unless a
stop string did before. Stop token ids are the engine's business (it never emits beyond one). Next: live_request.py,
which cuts ids, log-probabilities and counts where the text was cut.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.engine.tokenizer import IncrementalDetokenizer


class StopStrings:
    """Searches growing text; holds back an ending that may be the beginning of a stop string."""

    __slots__ = ('_held', '_include', '_longest', '_stops')

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: the text keeps the stop string that ended it."""
        self._stops = tuple(dict.fromkeys(stops))
        self._longest = max(map(len, self._stops), default=0)
        self._include = include
        self._held = ''

    def push(self, text: str, armed: bool = True) -> tuple[str, int | None]:
        """Text that may be shown, and, if a stop string ends in `text`, the number of characters of `text` it needs.

        Not `armed`: a stop string that ends in `text` does not count, one that only begins there may count later.
        """
        if not self._stops:
            return text, None
        num_before = len(self._held)
        text = self._held + text
        hit = self._first_hit(text, num_before) if armed else None
        if hit is not None:
            start, end = hit
            self._held = ''
            return text[: end if self._include else start], end - num_before
        num_shown = len(text) - self._num_held(text)
        self._held = text[num_shown:]
        return text[:num_shown], None

    def flush(self) -> str:
        """What was held back for a stop string that did not come."""
        text, self._held = self._held, ''
        return text

    def _first_hit(self, text: str, num_before: int) -> tuple[int, int] | None:
        """(start, end) of the hit with the smallest end beyond `num_before`, the longest of these."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, num_before - len(stop) + 1))
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or (end, start) < (best[1], best[0]):
                best = start, end
        return best

    def _num_held(self, text: str) -> int:
        """Length of the longest ending of `text` that some stop string begins with."""
        longest = 0
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= start < len(text) - longest:
                if stop.startswith(text[start:]):
                    longest = len(text) - start
                start = text.find(stop[0], start + 1)
        return longest


class RepetitionStop:
    """Fires when the last `size` tokens of the output have occurred in it `threshold` times, overlaps counted."""

    __slots__ = ('_counts', '_last', '_threshold')

    def __init__(self, size: int, threshold: int) -> None:
        """Size or threshold 0 never fires."""
        self._threshold = threshold if size else 0
        self._last: deque[int] = deque(maxlen=size)
        self._counts: Counter[tuple[int, ...]] = Counter()

    @property
    def is_active(self) -> bool:
        return self._threshold > 0

    def push(self, token_id: int) -> bool:
        self._last.append(token_id)
        if len(self._last) < (self._last.maxlen or 0):
            return False
        ngram = tuple(self._last)
        self._counts[ngram] += 1
        return self._counts[ngram] >= self._threshold


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one step adds to the text: `num_tokens` of the step's tokens belong to it; `stopped`: nothing follows."""

    text: str
    num_tokens: int
    stopped: bool = False


class TextStream:
    """Turns a request's token ids into text, step by step, up to its first stop string or repetition.

    Both act from the `min_tokens`-th token on: the token that completes them must have at least that number.
    """

    __slots__ = ('_detokenizer', '_ended', '_min_tokens', '_num_tokens', '_repetition', '_stops')

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        stops: StopStrings,
        min_tokens: int = 0,
        repetition: RepetitionStop | None = None,
    ) -> None:
        self._detokenizer, self._stops, self._min_tokens = detokenizer, stops, min_tokens
        self._repetition = repetition if repetition is not None and repetition.is_active else None
        self._num_tokens = 0
        self._ended = False

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        if self._repetition is None:
            return self._push_until_string(token_ids)
        num_until = self._num_until_repetition(self._repetition, token_ids)
        piece = self._push_until_string(token_ids[:num_until])
        if piece.stopped or num_until is None:
            return piece
        return TextPiece(piece.text, piece.num_tokens, stopped=True)

    def _num_until_repetition(self, repetition: RepetitionStop, token_ids: Sequence[int]) -> int | None:
        """How many of the ids there are up to the one that completes a repetition; None if none does."""
        for number, token_id in enumerate(token_ids, 1):
            if repetition.push(token_id) and self._num_tokens + number >= self._min_tokens:
                return number
        return None

    def _push_until_string(self, token_ids: Sequence[int]) -> TextPiece:
        num_unarmed = min(len(token_ids), max(0, self._min_tokens - 1 - self._num_tokens))
        if num_unarmed == 0:
            return self._push_armed(token_ids)
        early_text, _ = self._stops.push(self._detokenizer.push(token_ids[:num_unarmed]), armed=False)
        self._num_tokens += num_unarmed
        piece = self._push_armed(token_ids[num_unarmed:])
        return TextPiece(early_text + piece.text, num_unarmed + piece.num_tokens, piece.stopped)

    def finish(self) -> str:
        """What is still held back when the request ends without a stop string; half a character is not searched."""
        if self._ended:
            return ''
        self._ended = True
        shown, _ = self._stops.push(self._detokenizer.flush(), armed=False)
        return shown + self._stops.flush()

    def _push_armed(self, token_ids: Sequence[int]) -> TextPiece:
        before = self._detokenizer.copy()
        shown, num_characters = self._stops.push(self._detokenizer.push(token_ids))
        if num_characters is None:
            self._num_tokens += len(token_ids)
            return TextPiece(shown, len(token_ids))
        self._ended = True
        num_tokens = _num_tokens_of(before, token_ids, num_characters)
        self._num_tokens += num_tokens
        return TextPiece(shown, num_tokens, stopped=True)


def _num_tokens_of(detokenizer: IncrementalDetokenizer, token_ids: Sequence[int], num_characters: int) -> int:
    """How many of the ids it takes until `num_characters` of their text are there."""
    for number, token_id in enumerate(token_ids, 1):
        num_characters -= len(detokenizer.push((token_id,)))
        if num_characters <= 0:
            return number
    raise AssertionError('the tokens of a step have less text one by one than together')
