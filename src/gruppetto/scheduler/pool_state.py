"""What the pool holds and what a scheduling policy may read of it (`PoolView`). Changes nothing.

Owns the indexes: groups by age, ready groups by (age, time), the queue, the engines' account. All reads are O(1) or
O(what is asked for).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from gruppetto.scheduler.beliefs.lengths import LengthBelief
from gruppetto.scheduler.census import Census
from gruppetto.scheduler.entries import Deferred, EngineSeat, GroupEntry, RolloutEntry
from gruppetto.scheduler.index import AgeIndex
from gruppetto.scheduler.policies.order import Order
from gruppetto.scheduler.queueing import RolloutQueue
from gruppetto.scheduler.seating import Seating
from gruppetto.scheduler.views import RatesView


class PoolState:
    """The state, readable; `Pool` adds the transitions."""

    def __init__(
        self,
        *,
        batch_groups: int,
        group_size: int,
        engines: Sequence[EngineSeat],
        max_tokens: int = 1 << 30,
        colocated: bool = True,
        order: Order | None = None,
        finish_first: bool = False,
    ) -> None:
        self.batch_groups, self.group_size, self.max_tokens = batch_groups, group_size, max_tokens
        self.colocated = colocated
        self.version = 0
        self.training = False
        self.exhausted = False
        self.has_turns = False
        self.trainer_waits = False
        self.defer_above: float | None = None
        self.rates: RatesView | None = None
        self.num_running = self.num_waiting = self.num_long = 0
        self.groups: dict[int, GroupEntry] = {}
        self.rollouts: dict[str, RolloutEntry] = {}
        self.committed: list[GroupEntry] = []
        self.deferred: deque[Deferred] = deque()
        self.census = Census()
        self.next_group_id = 0
        self.line = RolloutQueue(order, finish_first=finish_first)
        self.seating = Seating(engines)
        self._chunked: dict[str, RolloutEntry] = {}
        self._ages: AgeIndex[int, GroupEntry] = AgeIndex()
        self._ready_ages: AgeIndex[int, GroupEntry] = AgeIndex()
        self._ready: list[tuple[int, int, int]] = []
        self._next_ready = 0

    # -- what policies read (PoolView) --------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        return len(self.groups) - len(self._ready)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def num_committed(self) -> int:
        return len(self.committed)

    @property
    def num_queued(self) -> int:
        return self.line.size

    @property
    def idle_share(self) -> float:
        return self.seating.idle_share

    @property
    def num_deferred(self) -> int:
        return len(self.deferred)

    @property
    def oldest_deferred(self) -> int:
        return self.deferred[0].since if self.deferred else self.version

    @property
    def lengths(self) -> LengthBelief | None:
        return self.line.lengths

    @property
    def serving(self) -> list[str]:
        """Names of the engines that serve."""
        return [seat.name for seat in self.seating.serving]

    @property
    def num_seats(self) -> int:
        return self.seating.num_open

    @property
    def num_slow(self) -> int:
        return self.seating.num_slow

    def seats(self) -> Sequence[EngineSeat]:
        return self.seating.open

    def least_taken(self, mean: float) -> Iterator[tuple[float, int, EngineSeat]]:
        return self.seating.least_taken.order(mean)

    def engines(self) -> Sequence[EngineSeat]:
        return self.seating.serving

    def engine(self, name: str) -> EngineSeat | None:
        return self.seating.find(name)

    def queue(self) -> Iterator[RolloutEntry]:
        return iter(self.line)

    def chunked(self) -> Sequence[RolloutEntry]:
        return list(self._chunked.values()) if self._chunked else ()

    def ready(self, count: int) -> Sequence[int]:
        return [group for _, _, group in self._ready[:count]]

    def live(self) -> Iterable[int]:
        return list(self.groups)

    def num_behind(self, version: int) -> int:
        return len(self.groups) if version >= self.version else self._ages.count_up_to(version)

    def num_ready_behind(self, version: int) -> int:
        return len(self._ready) if version >= self.version else self._ready_ages.count_up_to(version)

    def groups_behind(self, version: int) -> Iterable[int]:
        return [group.id for group in self._ages.up_to(version)]
