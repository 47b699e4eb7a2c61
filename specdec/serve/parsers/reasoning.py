"""Reasoning between <think> and </think>, told apart from the answer proper, whatever the pieces it arrives in.

The white space at both ends of the reasoning, and before the answer, belongs to neither. Next: tools.py.
"""

from specdec.serve.parsers.marks import held_length, split_at

BEGIN, END = '<think>', '</think>'


class NoReasoning:
    """Everything is content."""

    def push(self, text: str) -> tuple[str, str]:
        return '', text

    def flush(self) -> tuple[str, str]:
        return '', ''


class ThinkTags:
    """`inside`: the prompt has opened the section already, as templates of models that always reason do."""

    def __init__(self, inside: bool) -> None:
        self._state = 'reasoning' if inside else 'start'
        self._held = ''
        self._has_reasoning = False

    def push(self, text: str) -> tuple[str, str]:
        """(new reasoning, new content)"""
        self._held += text
        reasoning = ''
        if self._state == 'start':
            self._begin()
        if self._state == 'reasoning':
            reasoning = self._reason()
        if self._state == 'gap' and (rest := self._held.lstrip()):
            self._state, self._held = 'content', rest
        if self._state != 'content':
            return reasoning, ''
        content, self._held = self._held, ''
        return reasoning, content

    def flush(self) -> tuple[str, str]:
        """What was held back for a mark that did not come."""
        held, self._held = self._held, ''
        if self._state == 'reasoning':
            return held.rstrip(), ''
        return '', '' if self._state == 'gap' else held

    def _begin(self) -> None:
        """Reasoning opens an answer or does not occur; white space may come first."""
        text = self._held.lstrip()
        if text.startswith(BEGIN):
            self._state, self._held = 'reasoning', text[len(BEGIN) :]
        elif text and not BEGIN.startswith(text):
            self._state = 'content'

    def _reason(self) -> str:
        before, after = split_at(self._held, END)
        shown = before.rstrip()
        if after is None:
            self._held = self._held[len(shown) :]
        else:
            self._state, self._held = 'gap', after
        if not self._has_reasoning:
            shown = shown.lstrip()
            self._has_reasoning = bool(shown)
        return shown


class ReasoningTokens:
    """Counts the tokens up to the end of the reasoning, its marks included."""

    def __init__(self, inside: bool) -> None:
        self._state = 'reasoning' if inside else 'start'
        self._tail = ''
        self._num_pending = 0  # tokens that count if the section turns out to have begun with them
        self.count = 0

    def push(self, token_texts: list[str]) -> None:
        for text in token_texts:
            if self._state == 'content':
                return
            self._tail += text
            if self._state == 'start':
                self._begin()
            else:
                self.count += 1
                if END in self._tail:
                    self._state = 'content'
                self._tail = self._tail[len(self._tail) - held_length(self._tail, END) :]

    def _begin(self) -> None:
        self._num_pending += 1
        text = self._tail.lstrip()
        if text.startswith(BEGIN):
            self._state, self._tail, self.count = 'reasoning', text[len(BEGIN) :], self._num_pending
            if END in self._tail:
                self._state = 'content'
        elif text and not BEGIN.startswith(text):
            self._state = 'content'
