"""A scheduling policy from its four choices: rounds, order, unfinished, freshness (and where things run).

Every preset is one of these. Promises: pure; a combination that makes no sense is refused with the reason (`problems`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gruppetto.scheduler.actions import Action, CloseBatch, Commit, DropGroup, ParkAll
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.scheduler.policies.order import Fifo, Order
from gruppetto.scheduler.policies.placing import Placing
from gruppetto.scheduler.policies.rounds import Continuous, Frozen, Rounds, ShortLong, ready_in_all
from gruppetto.scheduler.policies.versions import update
from gruppetto.scheduler.views import PoolView
from gruppetto.types import DropReason

PARTS = 16
"""A trainer that shares its machines takes at most one part in so many of a batch at a time: a large one would still be
at work on half of the machines when all of them have come free."""

Unfinished = Literal["wait", "keep", "drop"]


@dataclass(frozen=True, slots=True)
class Composed:
    """The four choices.

    `unfinished` at a close: wait (the batch closes only when nothing is live), keep (parked where the engines are
    wanted for training, running on otherwise), drop (given up, and put off where the rounds have a long one).
    `stream`: the trainer takes finished groups while the tail runs. `max_parked_steps`: a group whose oldest token is
    older is dropped, which censors. `finish_first`: resumed rollouts of one age go by progress.
    """

    name: str = "composed"
    rounds: Rounds = field(default_factory=Continuous)
    order: Order = field(default_factory=Fifo)
    placing: Placing = field(default_factory=Placing)
    unfinished: Unfinished = "keep"
    freshness: Freshness = field(default_factory=lambda: Freshness(0, "wait"))
    stream: bool = False
    finish_first: bool = False
    max_parked_steps: int | None = None

    @property
    def censors(self) -> bool:
        """What is trained on depends on how long answers are."""
        drops = self.freshness.over_age == "drop" and self.freshness.max_staleness is not None
        return self.rounds.censors or drops or self.max_parked_steps is not None or self.unfinished == "drop"

    def decide(self, view: PoolView, now: float) -> Sequence[Action]:
        """What to do now; nothing while a batch is trained on where the engines are."""
        if view.training and view.colocated:
            return ()
        return (
            self._drop_expired(view)
            or self._close(view)
            or self._commit(view)
            or self.rounds.launch(view)
            or self.placing.go_on(view)
            or (update(view) if self.placing.own_version else ())
            or self.placing.fill(view)
        )

    def _close(self, view: PoolView) -> Sequence[Action]:
        """Closes the batch when it is complete and fresh enough; what the data leaves at its end is a smaller one."""
        if view.training or not (self.rounds.complete(view) or self._last(view)):
            return ()
        if self.unfinished == "wait" and view.num_live:
            return ()
        if self.unfinished != "drop" and not self.freshness.may_close(view):  # dropped, nothing stays behind
            return ()
        batch = view.ready(ready_in_all(view) - view.num_committed)
        rest = self.rounds.leave(view, batch) if self.unfinished == "drop" else ()
        if self.unfinished == "drop" and not rest:
            kept = set(batch)
            rest = [DropGroup(group, DropReason.SURPLUS) for group in view.live() if group not in kept]
        return (CloseBatch(tuple(batch)), *rest, *((ParkAll(),) if view.colocated else ()))

    def _last(self, view: PoolView) -> bool:
        if not view.exhausted or view.num_live or view.num_deferred:
            return False
        return view.num_ready + view.num_committed > 0

    def _commit(self, view: PoolView) -> Sequence[Action]:
        """Gives the idle trainer what is ready. Where engines and trainer share machines, only once half of them have
        nothing left to do."""
        if not self.stream or view.training or not view.trainer_waits or not view.num_ready:
            return ()
        count = self.freshness.may_commit(view)
        if view.colocated:
            if view.num_queued or view.idle_share < 0.5:
                return ()
            count = min(count, max(1, view.batch_groups // PARTS))
        return (Commit(tuple(view.ready(count))),) if count > 0 else ()

    def _drop_expired(self, view: PoolView) -> Sequence[Action]:
        if self.freshness.over_age != "drop" and self.max_parked_steps is None:
            return ()
        expired = dict.fromkeys(self.freshness.expired(view))
        if self.max_parked_steps is not None:
            expired |= dict.fromkeys(view.groups_behind(view.version - self.max_parked_steps - 1))
        return [DropGroup(group, DropReason.STALE) for group in expired]


def problems(policy: Composed, *, colocated: bool) -> Iterator[tuple[str, str, str]]:
    """(choice, why it makes no sense, what to write instead) of a combination."""
    k, depth = policy.freshness.max_staleness, policy.rounds.depth
    waits = policy.freshness.over_age == "wait" and k is not None and policy.unfinished == "keep"
    if waits and k is not None and depth > k + 1 and not policy.rounds.censors:
        yield (
            "depth",
            f"depth = {depth:g} with over_age = 'wait' admits more groups than max_staleness = {k} can consume in time",
            f"depth = {k + 1} or less, or max_staleness = {int(-(-depth // 1)) - 1}",
        )
    yield from _unfinished(policy, colocated=colocated)
    yield from _own_versions(policy, colocated=colocated)


def _unfinished(policy: Composed, *, colocated: bool) -> Iterator[tuple[str, str, str]]:
    """What cannot become of groups that are unfinished when a batch closes. The rounds of tail_batch have no depth that
    anybody wrote: short ones drop, frozen ones leave nothing to drop."""
    rounds, depth, unfinished = policy.rounds, policy.rounds.depth, policy.unfinished
    if rounds.censors:
        if unfinished != "drop":
            why = f"short and long rounds put off what is unfinished, and unfinished = '{unfinished}' keeps it"
            yield "unfinished", why, "unfinished = 'drop'"
        elif isinstance(rounds, ShortLong) and rounds.over_prompts <= 1 and rounds.over_members <= 1:
            why = "over_prompts = 1 and over_members = 1 launch nothing beyond the batch, so that no round is short"
            yield "over_prompts", why, "over_prompts = 1.25 or over_members = 1.25"
        return
    if isinstance(rounds, Frozen):
        if unfinished == "drop":
            why = "unfinished = 'drop' has nothing to drop with boundary = 'frozen', which keeps every rollout"
            yield "unfinished", why, "unfinished = 'wait'"
        return
    if unfinished == "wait" and depth > 1:
        why = f"unfinished = 'wait' with depth = {depth:g} waits for groups that the batch has no place for"
        yield "unfinished", why, "depth = 1 or unfinished = 'keep'"
    if unfinished == "drop" and depth <= 1:
        yield "unfinished", "unfinished = 'drop' with depth = 1 has nothing to drop", "depth = 1.25 or more"
    fresh = policy.freshness.max_staleness == 0 and policy.freshness.over_age == "wait"
    if unfinished == "drop" and fresh and not colocated:
        yield (
            "unfinished",
            "unfinished = 'drop' with engines that run while the trainer trains launches groups whose tokens are one "
            "version old when their batch closes, and max_staleness = 0 forbids that",
            "max_staleness = 1, or run.placement = 'colocated'",
        )


def _own_versions(policy: Composed, *, colocated: bool) -> Iterator[tuple[str, str, str]]:
    """What does not go with rollouts that keep their version: each is of one, and has to be awaited."""
    if not policy.placing.own_version:
        return
    if colocated:
        yield (
            "versions",
            "versions = 'own' needs engines that run while the trainer trains, and placement = 'colocated' stops them",
            "run.placement = 'disaggregated'",
        )
    if policy.freshness.max_staleness is None:
        yield (
            "versions",
            "versions = 'own' keeps a version served while it has rollouts, and no age is waited for here, so that "
            "there would be any number of versions",
            "versions = 'newest', or type = 'windowed'",
        )
    if policy.freshness.over_age != "wait":
        yield (
            "over_age",
            f"over_age = '{policy.freshness.over_age}' with versions = 'own' would lose whole rollouts, each of which "
            "is of one version: they are awaited",
            "over_age = 'wait'",
        )
    if policy.placing.chunk is not None:
        yield (
            "chunk",
            f"chunk = {policy.placing.chunk} moves rollouts between engines, and with versions = 'own' others serve "
            "other versions",
            "versions = 'newest' (or chunk = 'none', where the preset has no chunks of its own)",
        )
