"""Items in the order of their keys, for a queue whose order changes while it is long.

Promises: keys are unique and totally ordered; iteration goes from the smallest key; adding, removing and reading the
head move at most a block of keys, whatever the size. A sorted list kept in blocks (the idea of the `sortedcontainers`
package), because a heap can neither be read in order nor forget an item.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=tuple[Any, ...])
Item = TypeVar("Item")

BLOCK = 512
"""A block is split when it holds twice as many keys."""


class SortedQueue(Generic[Key, Item]):
    """Key -> item, smallest key first. Must not be changed while it is iterated."""

    def __init__(self) -> None:
        self._items: dict[Key, Item] = {}
        self._blocks: list[list[Key]] = []
        self._last: list[Key] = []
        """The largest key of each block."""

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: Key) -> bool:
        return key in self._items

    def __iter__(self) -> Iterator[Item]:
        """The items from the head. What is not read costs nothing."""
        items = self._items
        for block in self._blocks:
            for key in block:
                yield items[key]

    def keys(self) -> Iterator[Key]:
        """The keys from the head."""
        for block in self._blocks:
            yield from block

    def first(self) -> Item:
        """The item of the smallest key. Raises `IndexError` when empty."""
        return self._items[self._blocks[0][0]]

    def add(self, key: Key, item: Item) -> None:
        """Raises `KeyError` where the key is taken."""
        if key in self._items:
            raise KeyError(f"the key {key} is taken")
        self._items[key] = item
        if not self._blocks:
            self._blocks.append([key])
            self._last.append(key)
            return
        at = min(bisect_left(self._last, key), len(self._blocks) - 1)
        block = self._blocks[at]
        insort(block, key)
        if len(block) >= 2 * BLOCK:
            self._blocks.insert(at + 1, block[BLOCK:])
            self._last.insert(at + 1, block[-1])
            del block[BLOCK:]
        self._last[at] = block[-1]

    def remove(self, key: Key) -> Item:
        """Takes the item out and returns it. Raises `KeyError` where there is none."""
        item = self._items.pop(key)
        at = bisect_left(self._last, key)
        block = self._blocks[at]
        del block[bisect_left(block, key)]
        if block:
            self._last[at] = block[-1]
        else:
            del self._blocks[at], self._last[at]
        return item
