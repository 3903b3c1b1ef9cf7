"""The present state of a run, small enough to be sent to another process: where a forecast begins.

Owns no tokens: a rollout is its progress by weights version. Promise: a pool filled from it (`fill`) has the same
groups, ages, finished siblings, ready order, number of deferred tasks and version as the one it was taken from
(`take`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gruppetto.clock import now
from gruppetto.scheduler.beliefs.posterior import History
from gruppetto.scheduler.entries import GroupEntry, RolloutEntry
from gruppetto.scheduler.pool import Pool
from gruppetto.sim.engine import Zeros
from gruppetto.types import FinishReason, RolloutState, Score, Segment, Task, TokenKind

DONE = (RolloutState.SCORED, RolloutState.READY, RolloutState.FINISHED)


@dataclass(frozen=True, slots=True)
class Member:
    """One rollout. `made`: (weights version, model tokens) in order; `others`: observation tokens."""

    made: tuple[tuple[int, int], ...]
    others: int
    done: bool

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.made)


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """One group that is not final."""

    members: tuple[Member, ...]
    needed: int
    long: bool
    oldest: int | None
    ready: bool
    prompt: int
    history: History | None


@dataclass(frozen=True, slots=True)
class Present:
    """The pool at one instant; ready groups in the order in which they became so."""

    version: int
    groups: tuple[LiveGroup, ...]
    deferred: int
    prompt: int
    """Prompt tokens of those to come."""


def take(pool: Pool, seconds_per_token: float) -> Present:
    """Running rollouts count with what they should have made since they started."""

    def member(entry: RolloutEntry) -> Member:
        made = [(s.version, len(s)) for s in entry.segments if s.kind is TokenKind.MODEL]
        if entry.state is RolloutState.RUNNING and entry.started_at is not None and seconds_per_token > 0:
            since = int((now() - entry.started_at) / seconds_per_token)
            made.append((entry.started_version, max(0, min(since, pool.max_tokens - 1 - entry.tokens))))
        return Member(tuple(made), entry.others, entry.state in DONE)

    groups = sorted(pool.groups.values(), key=lambda g: -1 if g.ready_order is None else g.ready_order)
    live = tuple(
        LiveGroup(
            tuple(member(m) for m in group.members if m.state is not RolloutState.DROPPED),
            group.needed,
            group.long,
            group.oldest,
            group.ready_order is not None,
            group.prompt,
            group.history,
        )
        for group in groups
    )
    prompts = [group.prompt for group in live]
    return Present(pool.version, live, len(pool.deferred), sum(prompts) // len(prompts) if prompts else 512)


def fill(pool: Pool, present: Present, task_of: Callable[[int, LiveGroup], Task]) -> None:
    """Puts the present into an empty pool; `task_of` gives group number i its task."""
    pool.version = present.version
    for live in present.groups:
        gid = pool.next_group_id
        pool.next_group_id += 1
        group = GroupEntry(gid, task_of(gid, live), live.needed, present.version, long=live.long, history=live.history)
        group.oldest = live.oldest
        group.members = [_entry(group, i, member) for i, member in enumerate(live.members)]
        group.open = sum(not member.done for member in live.members)
        pool.census.started += len(group.members)
        pool.census.tokens_made += sum(m.tokens for m in group.members)
        pool.census.live_tokens += sum(m.tokens for m in group.members)
        pool.insert(group)
        if live.ready:
            pool.make_ready(gid)


def _entry(group: GroupEntry, number: int, member: Member) -> RolloutEntry:
    segments = [
        Segment(TokenKind.MODEL, version, range(count), Zeros(count)) for version, count in member.made if count
    ]
    tokens = member.tokens
    entry = RolloutEntry(f"g{group.id}.{number}", group, number, tokens=tokens, others=member.others, segments=segments)
    entry.oldest = min((segment.version for segment in segments), default=None)
    if member.done:
        group.finished += 1
        group.log_sum += math.log(max(1, tokens))
        group.longest = max(group.longest, tokens)
        entry.state, entry.finish, entry.score = RolloutState.SCORED, FinishReason.STOP, Score(reward=float(number % 2))
    elif tokens:
        entry.state = RolloutState.PARKED
    return entry
