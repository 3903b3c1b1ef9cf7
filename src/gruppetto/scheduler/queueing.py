"""The queue of rollouts that may start: resumed ones by age, then new ones in the scheduling policy's order.

Promises: a rollout that has tokens of older weights goes before every new one, so nobody starves whatever the order of
the new ones is (one that gave its slot up between two chunks counts as new until the next weights come). Of these the
ones whose KV is still on an engine go first, since they cost no prefill and hold room until they have run; then the
oldest token. Adding, removing and looking at the head do not grow with the queue.
"""

from __future__ import annotations

from collections.abc import Iterator

from gruppetto.scheduler.beliefs.lengths import LengthBelief
from gruppetto.scheduler.entries import GroupEntry, RolloutEntry
from gruppetto.scheduler.policies.order import Fifo, Order
from gruppetto.scheduler.sorted_queue import SortedQueue

RESUMED, NEW = 0, 1


class RolloutQueue:
    """`order` ranks new rollouts; with `finish_first` the resumed ones of one age go by progress, most first."""

    def __init__(self, order: Order | None = None, *, finish_first: bool = False) -> None:
        self._chosen = self._order = order or Fifo()
        self._finish_first = finish_first
        self._entries: SortedQueue[tuple[float, ...], RolloutEntry] = SortedQueue()
        self._arrivals = 0
        self._begun: dict[str, RolloutEntry] = {}
        """Those among the new ones that have tokens."""
        self.size = 0
        """How many wait; read at every decision."""
        self.lengths: LengthBelief | None = None
        self.trainer_share = 0.0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[RolloutEntry]:
        return iter(self._entries)

    def add(self, entry: RolloutEntry, *, resumed: bool) -> None:
        """`resumed`: by age; otherwise in the scheduling policy's order."""
        entry.queue_key = self._resumed_key(entry) if resumed else self._new_key(entry)
        if entry.tokens and not resumed:
            self._begun[entry.id] = entry
        self._entries.add(entry.queue_key, entry)
        self.size += 1

    def remove(self, entry: RolloutEntry) -> None:
        """Takes it out."""
        assert entry.queue_key is not None
        self._entries.remove(entry.queue_key)
        self.size -= 1
        entry.queue_key = None
        if self._begun:
            self._begun.pop(entry.id, None)

    def lost_kv(self, entry: RolloutEntry) -> None:
        """Its KV is on no engine any more: it goes behind those whose KV is."""
        key = entry.queue_key
        if key is not None and key[:2] == (RESUMED, 0):
            self._entries.remove(key)
            entry.queue_key = _cold(key)
            self._entries.add(entry.queue_key, entry)

    def age(self) -> None:
        """The weights have changed: whoever has tokens is one of the resumed ones from here on."""
        for entry in sorted(self._begun.values(), key=lambda entry: entry.queue_key or ()):
            self.remove(entry)
            self.add(entry, resumed=True)

    def without_kv(self) -> list[RolloutEntry]:
        """In the order that it will have when no engine keeps KV any more. O(n log n)."""
        return sorted(self._entries, key=lambda entry: _cold(entry.queue_key or ()))

    def resumed(self, entry: RolloutEntry) -> bool:
        """Whether it stands among the resumed ones."""
        return entry.queue_key is not None and entry.queue_key[0] == RESUMED

    def learned(self, group: GroupEntry) -> None:
        """A member of `group` has finished: what is left of its siblings is known better."""
        if self._order.rekeys:
            for entry in group.members:
                if entry.queue_key is not None and entry.queue_key[0] == NEW:
                    self.remove(entry)
                    self.add(entry, resumed=False)

    def believe(self, lengths: LengthBelief | None) -> None:
        """New beliefs about lengths. O(queue)."""
        self.lengths = lengths
        if self._order.rekeys or self._order.needs_belief:
            self._requeue()

    def follow(self, order: Order, *, finish_first: bool) -> None:
        """Another order from here on. O(queue)."""
        self._chosen = order
        self._rank(order.beside(self.trainer_share), finish_first)

    def beside(self, trainer_share: float) -> None:
        """A trainer took finished groups of the last batch while rollouts ran, and computed in so much of the step; 0
        where it took the batch whole. O(queue) where that changes the order."""
        self.trainer_share = trainer_share
        self._rank(self._chosen.beside(trainer_share), self._finish_first)

    def _rank(self, order: Order, finish_first: bool) -> None:
        if (order, finish_first) != (self._order, self._finish_first):
            self._order, self._finish_first = order, finish_first
            self._requeue()

    def _requeue(self) -> None:
        for entry in list(self._entries):
            resumed = self.resumed(entry)
            self.remove(entry)
            self.add(entry, resumed=resumed)

    def _resumed_key(self, entry: RolloutEntry) -> tuple[float, ...]:
        self._arrivals += 1
        age = entry.oldest if entry.oldest is not None else entry.started_version
        return (RESUMED, 0 if entry.reserved else 1, age, -entry.tokens if self._finish_first else 0, self._arrivals)

    def _new_key(self, entry: RolloutEntry) -> tuple[float, ...]:
        return (NEW, *self._order.key(entry, entry.group, self.lengths))


def _cold(key: tuple[float, ...]) -> tuple[float, ...]:
    """The key of one whose KV is on no engine."""
    return (RESUMED, 1, *key[2:]) if key[:2] == (RESUMED, 0) else key
