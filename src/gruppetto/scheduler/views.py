"""What a scheduling policy may see: lengths, ages, versions, states, slots. Never tokens, clocks or sockets.

Read-only faces of the pool's live state: reading them costs O(1) or what is asked for, so that a decision does not grow
with the pool. A scheduling policy must not keep them between calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol


class RolloutView(Protocol):
    """One rollout that is not final."""

    @property
    def id(self) -> str: ...

    @property
    def group_id(self) -> int: ...

    @property
    def tokens(self) -> int:
        """Model tokens made so far."""
        ...

    @property
    def oldest(self) -> int | None:
        """Weights version of its oldest model token; None while it has none."""
        ...


class EngineView(Protocol):
    """One engine that serves."""

    @property
    def name(self) -> str: ...

    @property
    def capacity(self) -> int:
        """Rollouts it may hold: slots and a short queue that hides the way to the scheduler."""
        ...

    @property
    def load(self) -> int:
        """Rollouts it holds."""
        ...


class PoolView(Protocol):
    """The whole pool."""

    @property
    def version(self) -> int:
        """V: batches trained so far, the version that new tokens get."""
        ...

    @property
    def batch_groups(self) -> int:
        """N: groups in a batch."""
        ...

    @property
    def training(self) -> bool:
        """A batch is closed and its weights are not published yet."""
        ...

    @property
    def exhausted(self) -> bool:
        """The data has ended; nothing more can be launched."""
        ...

    @property
    def num_live(self) -> int:
        """Groups launched and not complete."""
        ...

    @property
    def num_ready(self) -> int:
        """Groups complete and waiting to be trained on."""
        ...

    @property
    def num_running(self) -> int:
        """Rollouts on engines."""
        ...

    @property
    def num_queued(self) -> int:
        """Rollouts that may start."""
        ...

    def seats(self) -> Sequence[EngineView]:
        """Engines that serve and have room for a rollout, in a fixed order."""
        ...

    def queue(self) -> Iterator[RolloutView]:
        """Rollouts that may start: resumed ones by `oldest`, then new ones in the order of their launch."""
        ...

    def ready(self, count: int) -> Sequence[int]:
        """Ids of the first `count` ready groups by (oldest token, time they became ready)."""
        ...

    def num_behind(self, version: int) -> int:
        """Groups live or ready whose oldest token has at most `version`. A group without tokens counts as V."""
        ...

    def num_ready_behind(self, version: int) -> int:
        """The ready ones among them."""
        ...

    def groups_behind(self, version: int) -> Iterable[int]:
        """Ids of the groups that `num_behind` counts, for `version` < V."""
        ...
