"""How much is live, and when a batch is complete: the first of the four choices.

Pure rules over the view. `depth` is what a rule may have outstanding (live, ready or given to the trainer), in batches:
the bound on staleness rests on it. Sources: our scheduling study, sections 3 and 5; RollPacker (2509.21009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gruppetto.scheduler.actions import Action, DropGroup, Launch
from gruppetto.scheduler.views import PoolView
from gruppetto.types import DropReason


def outstanding(view: PoolView) -> int:
    """Groups launched that no publish has followed yet: live, ready, or with the trainer."""
    return view.num_live + view.num_ready + view.num_committed


def ready_in_all(view: PoolView) -> int:
    """Groups that a batch closed now could have: ready ones and those the trainer has already."""
    return min(view.batch_groups, view.num_ready + view.num_committed)


class Rounds(Protocol):
    """A rule for admission and completeness."""

    @property
    def depth(self) -> float:
        """Most groups outstanding, in batches."""
        ...

    @property
    def censors(self) -> bool:
        """What is trained on depends on how long answers are."""
        ...

    def launch(self, view: PoolView) -> Sequence[Action]:
        """What to launch now."""
        ...

    def complete(self, view: PoolView) -> bool:
        """Whether a whole batch is ready."""
        ...

    def leave(self, view: PoolView, batch: Sequence[int]) -> Sequence[Action]:
        """What becomes of the groups outside the batch that closes."""
        ...


def _put_off(view: PoolView, missing: int) -> Launch | None:
    """For rules that put no prompt off: those that another policy has left come first."""
    return Launch(min(missing, view.num_deferred), long=True) if view.num_deferred else None


@dataclass(frozen=True, slots=True)
class Continuous:
    """Keeps `depth` batches outstanding. A batch that is being trained on counts among them: groups launched meanwhile
    would otherwise be one version older than counted.

    `max_defer`: prompts that history predicts to be long are put off, and run together in a step of their own once
    there are N of them or the first has waited so many steps (history deferral; None = never). Nothing is wasted and
    nothing is censored: the choice uses only what is known before sampling.
    """

    depth: float = 1.0
    max_defer: int | None = None
    censors: bool = False

    def launch(self, view: PoolView) -> Sequence[Action]:
        missing = math.ceil(self.depth * view.batch_groups - 1e-9) - outstanding(view)
        if missing <= 0 or (view.exhausted and not view.num_deferred):
            return ()
        if self.max_defer is None:
            return (_put_off(view, missing) or Launch(missing),)
        if self._long_is_due(view):
            return (Launch(min(missing, max(1, view.batch_groups - view.num_long)), long=True),)
        return (Launch(missing, defer_above=view.defer_above),)

    def _long_is_due(self, view: PoolView) -> bool:
        if not view.num_deferred:
            return view.exhausted
        waited = view.version - view.oldest_deferred
        begun = 0 < view.num_long < view.batch_groups and view.num_long == view.num_live + view.num_ready
        return begun or view.exhausted or view.num_deferred >= view.batch_groups or waited >= (self.max_defer or 0)

    def complete(self, view: PoolView) -> bool:
        return view.num_ready + view.num_committed >= view.batch_groups

    def leave(self, view: PoolView, batch: Sequence[int]) -> Sequence[Action]:
        return ()


@dataclass(frozen=True, slots=True)
class ShortLong:
    """Tail batching: short rounds of `over_prompts` x N prompts with `over_members` x G members each (RollPacker's own
    runs have 1.25 for both), of which the first N whole groups are kept and the rest is thrown away, its prompts put
    off; once N of them have come together (or the first has waited `max_defer` steps) a long round runs them from
    scratch and waits for all.

    It censors: who is long must be drawn short, or wait for a long round.
    """

    over_prompts: float = 1.25
    over_members: float = 1.0
    max_defer: int = 10
    censors: bool = True

    @property
    def depth(self) -> float:
        return self.over_prompts

    def launch(self, view: PoolView) -> Sequence[Action]:
        live = outstanding(view)
        if view.training or (view.exhausted and not view.num_deferred):
            return ()
        if live == 0 and self._long_is_due(view):
            return (Launch(view.batch_groups, long=True),)
        wanted = self.over_prompts * view.batch_groups if live == 0 else view.batch_groups
        missing = math.ceil(wanted - 1e-9) - live
        if missing <= 0:
            return ()
        if view.num_long or view.exhausted:
            return (Launch(missing, long=True),)
        return (Launch(missing, extra=math.ceil((self.over_members - 1) * view.group_size - 1e-9)),)

    def _long_is_due(self, view: PoolView) -> bool:
        waited = view.version - view.oldest_deferred
        aged = view.num_deferred > 0 and (waited >= self.max_defer or view.exhausted)
        return aged or view.num_deferred >= view.batch_groups

    def complete(self, view: PoolView) -> bool:
        return view.num_ready + view.num_committed >= view.batch_groups

    def leave(self, view: PoolView, batch: Sequence[int]) -> Sequence[Action]:
        kept = set(batch)
        return [DropGroup(group, DropReason.SURPLUS, defer=True) for group in view.live() if group not in kept]


def _room(view: PoolView) -> int:
    """Rollouts that engines have free slots for beyond those queued."""
    return sum(max(0, engine.slots - engine.load) for engine in view.seats()) - view.num_queued


@dataclass(frozen=True, slots=True)
class Frozen:
    """Tail batching with the weights frozen over the rounds of a step and all tokens kept: in effect a batch `rounds`
    times as large. The view's N is the whole of it.

    `over_prompts` / `rounds` of it are live at a time, and more while engines have free slots: under frozen weights
    nothing is gained by launching late, and a step ends with the last rollout that runs to the cap.
    """

    rounds: int = 5
    over_prompts: float = 1.25
    censors: bool = False
    depth: float = 1.0

    def launch(self, view: PoolView) -> Sequence[Action]:
        unlaunched = view.batch_groups - outstanding(view)
        if unlaunched <= 0 or (view.exhausted and not view.num_deferred):
            return ()
        at_a_time = math.ceil(self.over_prompts * view.batch_groups / self.rounds - 1e-9)
        missing = min(unlaunched, max(at_a_time - view.num_live, -(-_room(view) // view.group_size)))
        return (_put_off(view, missing) or Launch(missing),) if missing > 0 else ()

    def complete(self, view: PoolView) -> bool:
        return view.num_ready + view.num_committed >= view.batch_groups

    def leave(self, view: PoolView, batch: Sequence[int]) -> Sequence[Action]:
        return ()
