"""Pages: who holds them, which content they keep, and which go first when memory is short.

Every page but the scratch page 0 is free, held (by one or more sequences) or cached (held by nobody, its content still
known). A cached page is found again by what led to it: its key is (key of the page before, its own tokens), so equal
keys mean equal prefixes and no hash can collide. Next: sequence.py, which holds pages.
"""

from collections import OrderedDict
from collections.abc import Sequence as Tokens

from specdec.scheduler.states import StatePool

ROOT = 0  # the key id of the empty prefix


class PagePool:
    """`num_pages` pages of `page_size` tokens, page 0 being scratch and never handed out; `num_states` copies of what
    requests keep by slot (states.py), 0 where models keep nothing there.
    """

    def __init__(self, num_pages: int, page_size: int, caching: bool, num_states: int = 0) -> None:
        self.states = StatePool(num_states if caching else 0)
        self.num_pages, self.page_size, self.caching = num_pages, page_size, caching
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders = [0] * num_pages
        self._cached: OrderedDict[int, None] = OrderedDict()  # held by nobody, least recently used first
        self._by_key: dict[tuple[int, tuple[int, ...]], int] = {}  # (key id before, tokens) -> page
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}  # page -> its entry in _by_key
        self._key_ids: dict[int, int] = {}  # page -> the id that pages after it use
        self._next_key_id = ROOT + 1

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return sum(count > 0 for count in self._holders)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """Hold `count` fresh pages, forgetting the least recently used content first; the caller checked for room."""
        assert count <= self.num_available, 'take() beyond num_available'
        taken = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            self._holders[page] = 1
            taken.append(page)
        return taken

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._by_key[self._keys.pop(page)]
        self.states.drop(self._key_ids.pop(page))
        return page

    def release(self, pages: Tokens) -> None:
        """Let go of a sequence's pages. The last ones age first: a prefix is worth more than what follows it."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._keys:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def match(self, tokens: Tokens) -> list[int]:
        """Pages whose content is a prefix of `tokens`, never the last token's: a hit must leave one row to compute."""
        pages: list[int] = []
        if not self.caching:
            return pages
        key_id, size = ROOT, self.page_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            page = self._by_key.get((key_id, tuple(tokens[start : start + size])))
            if page is None:
                break
            pages.append(page)
            key_id = self._key_ids[page]
        return pages

    def with_state(self, pages: list[int]) -> list[int]:
        """As many of the matched pages as can be gone on behind: all of them, if nothing is kept by slot."""
        if not self.states.num_states:
            return pages
        count = len(pages)
        while count and not self.states.has(self._key_ids[pages[count - 1]]):
            count -= 1
        return pages[:count]

    def hold(self, pages: Tokens) -> None:
        """Hold pages found by `match`."""
        for page in pages:
            self._holders[page] += 1
            self._cached.pop(page, None)

    def publish(self, key_id: int, tokens: tuple[int, ...], page: int) -> int:
        """Make a full, committed page findable behind the prefix `key_id`; returns the key id for the page after it.

        If another page already keeps the same content, that one stays the findable one.
        """
        if not self.caching:
            return ROOT
        key = (key_id, tokens)
        known = self._by_key.setdefault(key, page)
        if known != page:
            return self._key_ids[known]
        self._keys[page] = key
        self._key_ids[page] = self._next_key_id
        self._next_key_id += 1
        return self._key_ids[page]

    def key_after(self, pages: Tokens) -> int:
        """The key id behind matched pages."""
        return self._key_ids[pages[-1]] if pages else ROOT

    def check(self) -> None:
        """Every page is in exactly one place; cheap enough to run whenever the engine is idle."""
        assert len(self._free) + len(self._cached) + self.num_held == self.num_pages - 1, 'pages were lost or doubled'
        self.states.check()
        assert self._by_key.keys() == set(self._keys.values()), 'the prefix index and the pages disagree'
