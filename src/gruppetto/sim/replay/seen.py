"""What the events of a run folder say of each rollout: its tokens, where its turns ended, what the environment took.

Promise: no second that a rollout was seen to wait for its environment is left out. One that the record does not see
answered (it ends there, or the rollout or its group was given up) has lasted until then at least, and counts that much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gruppetto.errors import DAMAGED, UserError
from gruppetto.record.explain.read import Event
from gruppetto.sim.replay.rows import MOST_S, MOST_TOKENS
from gruppetto.sim.replay.takes import Takes
from gruppetto.sim.workload.base import Turn

MOST_MEMBERS = 1 << 16

BEYOND_S = 2e-6
"""By so much a wait without an answer was longer than it was seen to be, at least: records round to a microsecond."""


@dataclass(slots=True)
class Seen:
    """One rollout: its model tokens so far; model tokens at the end of each turn; what each answer of the environment
    took, and the context after it where that was said."""

    tokens: int = 0
    finished: bool = False
    waits: list[int] = field(default_factory=list)
    answers: list[tuple[float, int | None]] = field(default_factory=list)
    since: float | None = None
    """It waits for the environment since then."""
    until: float = 0.0
    """Where nobody has seen that wait end: until then at least it lasted."""

    def book(self, event: Event) -> None:
        """One event of this rollout."""
        tokens = event.tokens
        if event.kind in ("stop", "finish", "park"):
            self.tokens = tokens or self.tokens
            self.finished = event.kind == "finish"
        if event.kind == "wait" and tokens is not None:
            self.waits.append(tokens)
            self.since = event.t
        elif event.kind == "observe" and tokens is not None:
            self.answers.append((event.seconds or 0.0, tokens))
            self.since = None
        elif event.kind == "finish" and self.since is not None:
            self.answers.append((event.t - self.since if event.seconds is None else event.seconds, None))
            self.since = None
        elif event.kind == "drop":
            self.unanswered(event.t)

    def unanswered(self, t: float) -> None:
        """Its wait had not ended at `t`, and it may be that nobody sees it end."""
        self.until = t

    @property
    def _answered(self) -> Sequence[tuple[float, int | None]]:
        """`answers`, and at least the seconds of one that nobody saw."""
        if self.since is None or self.until < self.since:
            return self.answers
        return (*self.answers, (self.until - self.since + BEYOND_S, None))

    @property
    def beside(self) -> int | None:
        """Context beside its model tokens after the first answer; None where there was none."""
        context = self.answers[0][1] if self.answers and self.waits else None
        return None if context is None else context - self.waits[0]

    def turns(self, prompt: int) -> Iterator[Turn]:
        """Those that have ended."""
        made, beside = 0, prompt
        for end, (seconds, context) in zip(self.waits, self._answered, strict=False):
            grown = beside if context is None else context - end
            turn = Turn(end - made, max(0, grown - beside), seconds)
            if not (0 <= turn.model_tokens <= MOST_TOKENS and turn.observation_tokens <= MOST_TOKENS):
                raise _impossible(f"a turn from {made} to {end} model tokens in a context of {context}")
            if not 0 <= seconds <= MOST_S:
                raise _impossible(f"an environment that took {seconds:g} s for a turn")
            yield turn
            made, beside = end, grown


def _impossible(what: str) -> UserError:
    return UserError(f"events.jsonl tells of {what}, which cannot be; {DAMAGED}")


Rollouts = Mapping[tuple[int, int], Seen]
"""By (group, member)."""


def read_events(events: Iterable[Event]) -> tuple[Rollouts, Takes]:
    """What was seen of each rollout, and the groups in the order of launch."""
    seen: dict[tuple[int, int], Seen] = defaultdict(Seen)
    waiting: dict[int, dict[int, Seen]] = defaultdict(dict)
    takes, last = Takes(), 0.0
    for event in events:
        takes.take(event)
        last = event.t
        if event.group is None:
            continue
        if event.rollout is not None:
            member = member_of(event.rollout)
            one = seen[event.group, member]
            one.book(event)
            if event.kind == "wait":
                waiting[event.group][member] = one
            elif event.group in waiting and (one.since is None or event.kind == "drop"):
                waiting[event.group].pop(member, None)
        elif event.kind in ("drop", "ready"):  # who was still waiting was given up
            for one in waiting.pop(event.group, {}).values():
                one.unanswered(event.t)
    for one in (one for members in waiting.values() for one in members.values()):
        one.unanswered(last)
    return dict(seen), takes


def member_of(rollout: str) -> int:
    """Rollouts are called g<group>.<member>."""
    digits = rollout.rpartition(".")[2]
    return int(digits) if digits.isdecimal() else 0


def launched_members(seen: Rollouts) -> dict[int, int]:
    """How many members of each group were seen. Raises `UserError` for a number that no member has."""
    counts: dict[int, int] = defaultdict(int)
    for group, member in seen:
        if member >= MOST_MEMBERS:
            raise UserError(
                f"events.jsonl names rollout g{group}.{member}, and no group has so many members; {DAMAGED}"
            )
        counts[group] = max(counts[group], member + 1)
    return counts
