"""What the loop has learned of lengths: the belief over the last steps, and each prompt's history.

Fed with whole groups whose members all ran to their end, and never under a scheduling policy that censors: an estimate
from what such a policy trained on would take short answers for the rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from gruppetto.scheduler.beliefs.history import PromptHistory
from gruppetto.scheduler.beliefs.lengths import STEPS_HELD, LengthBelief, LengthEstimator
from gruppetto.scheduler.beliefs.posterior import History
from gruppetto.scheduler.entries import GroupEntry
from gruppetto.types import FinishReason, Task

RELIABLE = 0.3
"""Reliability of the history below which no prompt is put off by it (our scheduling study, section 3, step 9)."""

LONG_SHARE = 5
"""One prompt in so many counts as long."""


CALLS_HELD = 4096


class TurnMemory:
    """Turns and tool calls as they came; the last few thousand."""

    def __init__(self) -> None:
        self._calls: deque[tuple[float, int]] = deque(maxlen=CALLS_HELD)
        self._rollouts: deque[tuple[int, int]] = deque(maxlen=CALLS_HELD)
        self._held: deque[float] = deque(maxlen=CALLS_HELD)

    def call(self, seconds: float, answer: int) -> None:
        """A tool took `seconds` and answered with so many tokens."""
        self._calls.append((seconds, answer))

    def rollout(self, tokens: int, turns: int) -> None:
        """A finished rollout made `tokens` in `turns` turns."""
        self._rollouts.append((tokens, max(1, turns)))

    def went_on(self, held: float) -> None:
        """A rollout goes on after a tool call; `held` of all KV is kept for those that come back."""
        self._held.append(held)

    @property
    def held_share(self) -> float:
        """Mean share of the KV that is kept for rollouts that come back, where a rollout goes on."""
        return sum(self._held) / len(self._held) if self._held else 0.0

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of each call held."""
        return tuple(seconds for seconds, _ in self._calls)

    @property
    def tokens_an_answer(self) -> int:
        """Mean tokens of an observation."""
        return sum(answer for _, answer in self._calls) // max(1, len(self._calls))

    @property
    def tokens_a_turn(self) -> int:
        """Mean model tokens of a turn."""
        turns = sum(turns for _, turns in self._rollouts)
        return max(1, sum(tokens for tokens, _ in self._rollouts) // turns) if turns else 0

    @property
    def seconds_a_token(self) -> float:
        """Tool seconds for each model token."""
        tokens = self.tokens_a_turn
        return sum(self.seconds) / max(1, len(self._calls)) / tokens if tokens else 0.0

    @property
    def answers_a_token(self) -> float:
        """Observation tokens for each model token."""
        tokens = self.tokens_a_turn
        return self.tokens_an_answer / tokens if tokens else 0.0

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "calls": [list(call) for call in self._calls],
            "rollouts": [list(one) for one in self._rollouts],
            "held": list(self._held),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state()`."""
        self._calls.extend((seconds, answer) for seconds, answer in state["calls"])
        self._rollouts.extend((tokens, turns) for tokens, turns in state["rollouts"])
        self._held.extend(state["held"])


GROUPS_WANTED = 512
"""Groups that the belief should rest on, where that takes no more than `MAX_STEPS` steps: runaways are rare, and their
share wants a few dozen of them."""

MAX_STEPS = 32


class LengthMemory:
    """`cap`: model tokens of the longest possible rollout; `batch_groups`: groups of a step."""

    def __init__(self, cap: int, batch_groups: int) -> None:
        self.turns = TurnMemory()
        self.prompt_tokens = 0
        held = min(MAX_STEPS, max(STEPS_HELD, GROUPS_WANTED // batch_groups))
        self.estimator = LengthEstimator(cap, steps_held=held)
        self.history = PromptHistory(cap)
        self._cap = cap
        self._met: deque[bool] = deque(maxlen=batch_groups)
        """Of the last groups, whether their prompt had been seen before."""

    def add(self, group: GroupEntry) -> None:
        """A group is complete. One with members that did not run to their end tells nothing reliable."""
        members = [m for m in group.members if m.finish is not None and m.tokens]
        if len(members) < len(group.members) or not members:
            return
        lengths = [m.tokens for m in members]
        self.prompt_tokens = group.prompt
        for member in members:
            if member.turns:
                self.turns.rollout(member.tokens, member.turns)
        capped = [m.finish is not FinishReason.STOP for m in members]
        self.estimator.add(lengths, capped)
        self._met.append(self.history.past(group.task.id) is not None)
        self.history.record(group.task.id, lengths, capped)

    def close_step(self) -> LengthBelief | None:
        """A step is over; what is believed from here on."""
        self.estimator.close_step()
        return self.estimator.belief()

    @property
    def defer_above(self) -> float | None:
        """Predicted longest member above which a prompt counts as long; None while the history is not reliable."""
        return self.history.threshold(LONG_SHARE) if self.history.reliability >= RELIABLE else None

    @property
    def met_share(self) -> float:
        """Share of the last step's prompts that had been seen before; 0 where nothing is known."""
        return sum(self._met) / len(self._met) if self._met else 0.0

    def predicted_max(self, task: Task) -> float | None:
        """The longest member to be expected of a prompt that was seen before."""
        return self.history.predicted_max(task.id)

    def evidence(self, task: Task) -> History | None:
        """What its earlier epoch says of a prompt."""
        return self.history.evidence(task.id)

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {"lengths": self.estimator.state(), "history": self.history.state(), "turns": self.turns.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state()`."""
        self.estimator.load_state(state["lengths"])
        self.history.load_state(state["history"])
        self.turns.load_state(state["turns"])
