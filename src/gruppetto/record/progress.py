"""Where a run stands, folded from its events and steps: what screens and pages show.

Promises: every rollout is counted in exactly one stage; memory is that of the live rollouts and a few recent values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

STAGES = ("queued", "parked", "running", "finished", "ready", "training")
"""Stages of a live rollout, in the order of the flow. `finished` waits for its score or for its group."""

_RECENT_LENGTHS = 2048
_RECENT_STEPS = 60


@dataclass(slots=True)
class Progress:
    """The state of one run. `slots` is the number of slots of each engine by name."""

    steps: int
    group_size: int
    slots: Mapping[str, int]
    step: int = 0
    version: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    used: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT_LENGTHS))
    metrics: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))
    last_error: str = ""
    _stage: dict[str, str] = field(default_factory=dict)
    _engine: dict[str, str] = field(default_factory=dict)
    _members: dict[int, set[str]] = field(default_factory=dict)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Takes one event in; kinds it does not show are passed over."""
        match kind:
            case "launch":
                self._group(fields["group"])
            case "start":
                self._start(fields)
            case "stop":
                self._leave_engine(fields["rollout"])
                self._move([fields["rollout"]], "parked" if fields["reason"] == "abort" else "finished")
            case "park":
                self._move([fields["rollout"]], "parked")
            case "finish":
                self._finish(fields)
            case "ready":
                self._move(self._whole(fields["group"]), "ready")
            case "drop":
                self._drop(fields)
            case "close":
                for group in fields["groups"]:
                    self._move(self._whole(group), "training")
            case "train_end":
                self._trained()
            case "publish_end":
                self.version = fields["version"]
            case "error":
                self.last_error = str(fields.get("reason", ""))

    def metrics_of(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes one step's metrics in. `step` counts the steps that are done."""
        self.step = step
        self.metrics.append(metrics)

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last step at the pace of the recent ones; None before the first."""
        times = [t for m in list(self.metrics)[-10:] if (t := m.get("time/step_s")) is not None]
        return (self.steps - self.step) * sum(times) / len(times) if times else None

    def series(self, name: str) -> list[float]:
        """The recent values of one metric, oldest first."""
        return [value for metrics in self.metrics if (value := metrics.get(name)) is not None]

    def _group(self, group: int) -> set[str]:
        """The members seen so far; a group that is new has all of its members queued."""
        if group not in self._members:
            self._members[group] = set()
            self.counts["queued"] += self.group_size
        return self._members[group]

    def _whole(self, group: int) -> set[str]:
        """All members of a complete group; those that ended before a resume are counted under made-up ids."""
        members = self._group(group)
        members.update(f"g{group}.before.{index}" for index in range(self.group_size - len(members)))
        return members

    def _start(self, fields: Mapping[str, Any]) -> None:
        rollout, engine = fields["rollout"], fields["engine"]
        self._group(fields["group"]).add(rollout)
        self._engine[rollout] = engine
        self.used[engine] = self.used.get(engine, 0) + 1
        self._move([rollout], "running")

    def _finish(self, fields: Mapping[str, Any]) -> None:
        self._group(fields["group"]).add(fields["rollout"])
        self._move([fields["rollout"]], "finished")
        self.lengths.append(fields["tokens"])

    def _move(self, rollouts: Iterable[str], stage: str) -> None:
        """One that is seen for the first time comes out of the queue."""
        for rollout in rollouts:
            self.counts[self._stage.get(rollout, "queued")] -= 1
            self.counts[stage] += 1
            self._stage[rollout] = stage

    def _leave_engine(self, rollout: str) -> None:
        engine = self._engine.pop(rollout, None)
        if engine is not None:
            self.used[engine] -= 1

    def _drop(self, fields: Mapping[str, Any]) -> None:
        """A failed member waits for its group; a dropped group goes with all members, started or not."""
        if "rollout" in fields:
            self._move([fields["rollout"]], "finished")
            return
        members = self._group(fields["group"])
        del self._members[fields["group"]]
        self.counts["queued"] -= self.group_size - len(members)
        self.dropped += self.group_size
        self._forget(members)

    def _trained(self) -> None:
        self._forget([rollout for rollout, stage in self._stage.items() if stage == "training"])
        self._members = {g: m for g, m in self._members.items() if not m or not m.isdisjoint(self._stage)}

    def _forget(self, rollouts: Iterable[str]) -> None:
        for rollout in rollouts:
            self._leave_engine(rollout)
            self.counts[self._stage.pop(rollout)] -= 1
