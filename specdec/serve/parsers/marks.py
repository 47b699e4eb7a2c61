"""Marks in growing text, such as '</think>', that may arrive in any number of pieces. Next: reasoning.py, tools.py."""


def held_length(text: str, mark: str) -> int:
    """Length of the longest ending of `text` that `mark` begins with, the whole mark not counted."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def split_at(text: str, mark: str) -> tuple[str, str | None]:
    """(what surely stands before the mark, what follows it), the latter None while the mark has not come.

    Without the mark, an ending that may be its beginning is left out of the first part.
    """
    before, found, after = text.partition(mark)
    if found:
        return before, after
    return text[: len(text) - held_length(text, mark)], None
