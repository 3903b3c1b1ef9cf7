"""An index by weights version: what is oldest first, and how much is at most so old."""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class AgeIndex(Generic[Key, Item]):
    """Items in buckets by version, each in the order it came. Few versions are alive at a time, so all calls are O(1)
    or O(versions)."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[Key, Item]] = {}
        self._versions: list[int] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Item]:
        for version in self._versions:
            yield from self._buckets[version].values()

    def add(self, version: int, key: Key, item: Item) -> None:
        bucket = self._buckets.get(version)
        if bucket is None:
            bucket = self._buckets[version] = {}
            insort(self._versions, version)
        bucket[key] = item
        self._size += 1

    def remove(self, version: int, key: Key) -> None:
        bucket = self._buckets[version]
        del bucket[key]
        self._size -= 1
        if not bucket:
            del self._buckets[version]
            self._versions.remove(version)

    def count_up_to(self, version: int) -> int:
        """How many items have at most `version`."""
        return sum(len(self._buckets[v]) for v in self._versions if v <= version)

    def up_to(self, version: int) -> Iterator[Item]:
        """The items that have at most `version`, oldest first."""
        for v in self._versions:
            if v > version:
                return
            yield from self._buckets[v].values()
