"""What a scheduling policy may see: lengths, ages, versions, states, slots, KV, rates. Never tokens, clocks or sockets.

Read-only faces of the pool's live state: reading them costs O(1) or what is asked for, so that a decision does not grow
with the pool. A scheduling policy must not keep them between calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from gruppetto.scheduler.beliefs.lengths import LengthBelief
from gruppetto.scheduler.beliefs.posterior import History


class GroupView(Protocol):
    """One group that is not final."""

    @property
    def id(self) -> int: ...

    @property
    def finished(self) -> int:
        """Members whose whole length is known."""
        ...

    @property
    def log_sum(self) -> float:
        """Sum of their natural-log lengths."""
        ...

    @property
    def longest(self) -> int:
        """The longest of them."""
        ...

    @property
    def history(self) -> History | None:
        """What an earlier epoch says of the prompt."""
        ...


class RolloutView(Protocol):
    """One rollout that is not final."""

    @property
    def id(self) -> str: ...

    @property
    def group_id(self) -> int: ...

    @property
    def group(self) -> GroupView: ...

    @property
    def member(self) -> int: ...

    @property
    def tokens(self) -> int:
        """Model tokens made so far."""
        ...

    @property
    def context(self) -> int:
        """Tokens an engine must hold to go on with it: prompt, model tokens, observations."""
        ...

    @property
    def oldest(self) -> int | None:
        """Weights version of its oldest model token; None while it has none."""
        ...

    @property
    def home(self) -> str | None:
        """The engine where its KV was left; None where it has none."""
        ...

    @property
    def reserved(self) -> int:
        """KV tokens that are held for it at `home`; 0 where they were pushed out, or may be."""
        ...


class EngineView(Protocol):
    """One engine that serves."""

    @property
    def name(self) -> str: ...

    @property
    def slots(self) -> int: ...

    @property
    def capacity(self) -> int:
        """Rollouts it may hold: slots and a short queue that hides the way to the scheduler; fewer for want of KV."""
        ...

    @property
    def load(self) -> int:
        """Rollouts it holds."""
        ...

    @property
    def kv_capacity(self) -> int:
        """KV tokens it has room for; 0 = not known, so it does not limit."""
        ...

    @property
    def kv_running(self) -> int:
        """Contexts of what runs, at the size they may reach before they come back."""
        ...

    @property
    def kv_held(self) -> int:
        """Contexts kept for rollouts that come back next: in a tool call, parked, at the end of a chunk."""
        ...

    @property
    def num_away(self) -> int:
        """Rollouts that left their KV here when they last ran, in a tool call or in the queue now."""
        ...

    @property
    def expected(self) -> int:
        """Tokens that what runs here was believed to make still, when it started."""
        ...

    @property
    def slowness(self) -> float:
        """Times the time that the fastest engine takes; small differences count as none."""
        ...

    @property
    def slow(self) -> bool:
        """It is so much slower that it gets no new rollouts while there are others."""
        ...

    @property
    def version(self) -> int:
        """Weights version it serves."""
        ...

    @property
    def updating(self) -> bool:
        """It takes new weights at the moment, and no new rollouts."""
        ...


class RatesView(Protocol):
    """What is known of the engines' speed."""

    def step_s(self, rows: float, context: float = 0.0) -> float:
        """Seconds of one engine's decode step with `rows` rows that hold `context` tokens together."""
        ...

    @property
    def prefill_s(self) -> float:
        """Seconds to prefill one token."""
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
    def group_size(self) -> int:
        """G: rollouts of a group."""
        ...

    @property
    def max_tokens(self) -> int:
        """Model tokens of the longest possible rollout."""
        ...

    @property
    def trainer_waits(self) -> bool:
        """The trainer has nothing to do and could take a part of the next batch."""
        ...

    @property
    def defer_above(self) -> float | None:
        """Predicted longest member above which a prompt counts as long; None where nothing reliable is known."""
        ...

    @property
    def training(self) -> bool:
        """A batch is closed and its weights are not published yet."""
        ...

    @property
    def colocated(self) -> bool:
        """Engines and trainer share their machines: while a batch is trained on, nothing runs."""
        ...

    @property
    def has_turns(self) -> bool:
        """Rollouts call tools between their turns."""
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
    def num_committed(self) -> int:
        """Groups of the next batch that the trainer has been given already."""
        ...

    @property
    def num_running(self) -> int:
        """Rollouts on engines."""
        ...

    @property
    def num_queued(self) -> int:
        """Rollouts that may start."""
        ...

    @property
    def idle_share(self) -> float:
        """Share of the serving engines that hold no rollout. O(1)."""
        ...

    @property
    def num_waiting(self) -> int:
        """Rollouts in a tool call."""
        ...

    @property
    def num_deferred(self) -> int:
        """Tasks put off to a long round."""
        ...

    @property
    def oldest_deferred(self) -> int:
        """Version at which the first of them was put off (V where there is none)."""
        ...

    @property
    def num_long(self) -> int:
        """Groups of a long round that are live or ready."""
        ...

    @property
    def lengths(self) -> LengthBelief | None:
        """What is believed of the lengths; None before the first step."""
        ...

    @property
    def rates(self) -> RatesView | None:
        """What is known of the engines' speed."""
        ...

    @property
    def num_seats(self) -> int:
        """Engines that serve and have room for a rollout. O(1)."""
        ...

    @property
    def num_slow(self) -> int:
        """Engines much slower than the fastest one; some of them may not serve. O(1)."""
        ...

    def seats(self) -> Sequence[EngineView]:
        """Engines that serve and have room for a rollout, in a fixed order."""
        ...

    def least_taken(self, mean: float) -> Iterator[tuple[float, int, EngineView]]:
        """The same by how much of each would be taken with one more rollout of `mean` tokens, least first: (how much,
        its place among equals, engine). What is looked at is paid for."""
        ...

    def engines(self) -> Sequence[EngineView]:
        """All engines that serve, in a fixed order."""
        ...

    def engine(self, name: str) -> EngineView | None:
        """An engine that serves, by name."""
        ...

    def queue(self) -> Iterator[RolloutView]:
        """Rollouts that may start: resumed ones by `oldest`, then new ones in the order of the scheduling policy."""
        ...

    def chunked(self) -> Sequence[RolloutView]:
        """Rollouts that have come to the end of a chunk; each wants a `Start` or a `Yield`."""
        ...

    def ready(self, count: int) -> Sequence[int]:
        """Ids of the first `count` ready groups by (oldest token, time they became ready)."""
        ...

    def live(self) -> Iterable[int]:
        """Ids of all groups that are live or ready, in the order of their launch."""
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
