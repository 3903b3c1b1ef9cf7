"""What the pool holds: rollouts and groups that are not final, tasks put off, engines with what they carry.

Plain records that `Pool` alone changes. `segments` is the payload; nobody here looks into it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gruppetto.scheduler.beliefs.posterior import History
from gruppetto.types import DropReason, FinishReason, RolloutState, Score, Segment, Task


@dataclass(slots=True, eq=False)
class RolloutEntry:
    """One live rollout. `tokens` counts what the model made."""

    id: str
    group: GroupEntry
    member: int
    state: RolloutState = RolloutState.QUEUED
    tokens: int = 0
    others: int = 0
    """Tokens after the prompt that no model made (observations)."""
    oldest: int | None = None
    segments: list[Segment] = field(default_factory=list)
    engine: str | None = None
    """Where it runs."""
    home: str | None = None
    """Where its KV was left when it last ran; None where it has none."""
    started_version: int = 0
    """Weights version when it last started."""
    finish: FinishReason | None = None
    score: Score | None = None
    failure: str | None = None
    doomed: DropReason | None = None
    """Its group has gone on or has been given up; it is dropped as soon as it comes back."""
    parks: int = 0
    losses: int = 0
    chunks: int = 0
    turns: int = 0
    moves: int = 0
    started_at: float | None = None
    seconds: float = 0.0
    tool_seconds: float = 0.0
    queue_key: tuple[float, ...] | None = None
    seed: int | None = None
    """Of its random table; set when it is first sent to an engine."""
    expected: int = 0
    """Tokens that it was believed to make still when it last started; 0 while it does not run."""
    reserved: int = 0
    """KV tokens that its engine keeps for it: while it runs all it may come to need, afterwards what it left there."""
    group_id: int = field(init=False)
    context: int = field(init=False)
    """Tokens an engine must hold to go on with it: the prompt's, `tokens` and `others`."""

    def __post_init__(self) -> None:
        self.group_id, self.context = self.group.id, self.group.prompt
        if made := self.tokens + self.others:  # else all of a group have the prompt's number itself
            self.context += made


@dataclass(slots=True, eq=False)
class GroupEntry:
    """One group. `open` counts members that are neither scored nor failed; `needed` are wanted with a reward."""

    id: int
    task: Task
    needed: int
    born: int
    members: list[RolloutEntry] = field(default_factory=list)
    open: int = 0
    oldest: int | None = None
    ready_order: int | None = None
    long: bool = False
    """It belongs to a long round."""
    finished: int = 0
    """Members whose whole length is known."""
    log_sum: float = 0.0
    """Sum of their natural-log lengths."""
    longest: int = 0
    """The longest of them."""
    history: History | None = None
    """What an earlier epoch says of this prompt, if anything."""
    prompt: int = field(init=False)
    """Prompt tokens."""

    def __post_init__(self) -> None:
        self.prompt = len(self.task.prompt_ids)

    def usable(self) -> list[RolloutEntry]:
        """Members with a reward."""
        return [m for m in self.members if m.score is not None and m.score.reward is not None]


@dataclass(frozen=True, slots=True)
class Deferred:
    """A task put off to a long round, and the version at which it was."""

    task: Task
    since: int


@dataclass(slots=True, eq=False)
class EngineSeat:
    """What the pool knows of an engine. KV in tokens; `kv_capacity` 0 = not known, so it does not limit."""

    name: str
    index: int
    slots: int
    capacity: int
    """Rollouts it may hold: slots and a short queue that hides the way to the scheduler, fewer where its KV has no room
    for them. 0 = it serves no more."""
    kv_capacity: int = 0
    load: int = 0
    kv_running: int = 0
    """Contexts of what runs, at the size they may reach before they come back."""
    kv_held: int = 0
    """Contexts kept for rollouts that come back next: in a tool call, parked, at the end of a chunk."""
    num_away: int = 0
    """Rollouts that left their KV here when they last ran, in a tool call or in the queue now."""
    expected: int = 0
    """Tokens that what runs here was believed to make still, when it started."""
    slowness: float = 1.0
    """Times the time that the fastest engine takes; small differences count as none."""
    slow: bool = False
    """It is so much slower that it gets no new rollouts while there are others."""
    left: int = 0
    """Rollouts that have left it since the start."""
    version: int = 0
    updating: bool = False
    """It takes new weights at the moment, and no new rollouts."""
