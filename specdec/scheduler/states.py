"""Copies of what requests keep by slot, taken at page boundaries so that prefixes can be found by others.

A model with such state can go on behind a cached page only where a copy was made. A prompt's chunk therefore ends on
the last boundary before the prompt does, and on the deepest boundary where cached pages were found without a copy;
there one is made. Copies age by use and go with their page. Next: scheduler.py.
"""

from collections import OrderedDict


class StatePool:
    """States 1 .. `num_states`; none of them in a pool of 0, which stands for models that keep nothing by slot.

    States are found by key ids, the names of prefixes (pages.py).
    """

    def __init__(self, num_states: int) -> None:
        self.num_states = num_states
        self._free = list(range(num_states, 0, -1))
        self._by_key: OrderedDict[int, int] = OrderedDict()  # key id -> state, least recently used first

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, key_id: int) -> int:
        """The state behind the prefix `key_id`, 0 if there is none; it counts as used."""
        state = self._by_key.get(key_id, 0)
        if state:
            self._by_key.move_to_end(key_id)
        return state

    def has(self, key_id: int) -> bool:
        return key_id in self._by_key

    def take(self, key_id: int) -> int:
        """A state for the prefix `key_id`, which has none yet; the least recently used one goes if all are taken."""
        state = self._free.pop() if self._free else self._by_key.popitem(last=False)[1]
        self._by_key[key_id] = state
        return state

    def drop(self, key_id: int) -> None:
        """The prefix cannot be found any more."""
        if key_id in self._by_key:
            self._free.append(self._by_key.pop(key_id))

    def check(self) -> None:
        """Every state is in exactly one place."""
        assert sorted([*self._free, *self._by_key.values()]) == list(range(1, self.num_states + 1)), 'a state was lost'
