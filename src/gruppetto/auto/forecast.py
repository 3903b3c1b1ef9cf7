"""The next steps of a run under a candidate: the real scheduler on simulated engines, from the present state.

Promises: pure (same question and candidate, same forecast); all candidates of a question meet the same rollouts; what
is asked is plain data, so that it can be answered in another process, beside the trainer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from gruppetto.auto.foretold import TRIED, Foreknown, Foretold
from gruppetto.auto.learned import Remembered
from gruppetto.auto.present import LiveGroup, Present, fill
from gruppetto.clock import run_virtual
from gruppetto.controller import Controller, Stages
from gruppetto.errors import GruppettoError
from gruppetto.record.base import NullRecorder
from gruppetto.scheduler.beliefs.lengths import LengthBelief
from gruppetto.scheduler.beliefs.posterior import Siblings, sample_remaining
from gruppetto.scheduler.entries import Deferred, GroupEntry, RolloutEntry
from gruppetto.scheduler.loop import RolloutLoop
from gruppetto.scheduler.policies.base import SchedulingPolicy
from gruppetto.scheduler.policies.composed import Composed
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.sim.demand import Plan, Plans
from gruppetto.sim.engine import EngineModel
from gruppetto.sim.workload.base import Demand, Turn, uniform
from gruppetto.sim.world import Spec, TrainerModel, World
from gruppetto.step_record import StepFacts
from gruppetto.types import Task, TokenKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the next steps bring. `demand` is what prompts to come will ask for, `belief` what unfinished ones will."""

    present: Present
    settings: LoopSettings
    demand: Demand
    belief: LengthBelief
    model: EngineModel
    engines: int
    trainer: TrainerModel
    turns: bool
    kv_kept: bool
    seed: int
    tool_s: float = 0.0
    """Tool seconds to come of an unfinished rollout, per model token."""
    trainer_share: float = 0.0
    """Of the last step, in which a trainer beside the engines computed."""
    known: Foreknown | None = None
    """What prompts' past tells; None where none comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A candidate's next steps, the first ones (which only lead into it) left out."""

    candidate: SchedulingPolicy
    tokens_s: float = 0.0
    """Trained tokens a second."""
    groups_s: float = 0.0
    step_s: float = 0.0
    waste: float = 1.0
    """Share of generated tokens that are masked or dropped."""
    staleness: int = 0
    per_step: tuple[tuple[float, float], ...] = ()
    """(trained tokens, seconds) step by step."""
    failed: str = ""
    """Why there is no forecast."""

    def doubt(self, steps: int) -> float:
        """Twice the relative standard error of so many steps' trained tokens a second."""
        rest = self._residuals()
        return 2 * stdev(rest) / math.sqrt(steps) if len(rest) > 1 else 0.0

    def better_than(self, other: Forecast) -> tuple[float, float]:
        """(relative gain in trained tokens a second, twice the standard error of the paired difference)."""
        gain = self.tokens_s / other.tokens_s - 1 if other.tokens_s else float("inf")
        pairs = [a - b for a, b in zip(self._residuals(), other._residuals(), strict=False)]
        return gain, 2 * stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else 0.0

    def _residuals(self) -> list[float]:
        """Each step's trained tokens beyond what its seconds would give at the overall rate, over the mean step's: long
        and short steps alternate, so that the steps' own rates scatter far more than the rate of all of them."""
        if len(self.per_step) < 2 or not self.tokens_s:
            return []
        usual = self.tokens_s * self.step_s
        return [(tokens - self.tokens_s * seconds) / usual for tokens, seconds in self.per_step]


def forecast(question: Question, candidate: Composed, steps: int, skip: int) -> Forecast:
    """Runs `steps` steps after `skip` others. A candidate that cannot run is a forecast that says why."""
    answer: list[Forecast] = []

    def alone() -> None:  # a loop of its own needs a thread of its own, since the caller's is running
        try:
            answer.append(run_virtual(_run(question, candidate, steps, skip)))
        except (GruppettoError, AssertionError) as error:
            answer.append(Forecast(candidate=candidate, failed=str(error)))

    thread = threading.Thread(target=alone, name="forecast")
    thread.start()
    thread.join()
    if not answer:
        return Forecast(candidate=candidate, failed="the forecast broke off")
    return answer[0]


def forecast_all(question: Question, candidates: Sequence[Composed], steps: int, skip: int) -> list[Forecast]:
    """One forecast a candidate, in their order."""
    question = replace(question, demand=Remembered(question.demand))
    return [forecast(question, candidate, steps, skip) for candidate in candidates]


async def _run(question: Question, candidate: Composed, steps: int, skip: int) -> Forecast:
    plans = _NowPlans(question)
    spec = Spec(
        settings=replace(question.settings, lockstep=False, engine_queue=0),
        policy=candidate,
        plans=plans,
        model=question.model,
        engines=question.engines,
        steps=question.present.version + skip + steps,
        seed=question.seed,
        trainer=question.trainer,
        kv_on_swap="keep" if question.kv_kept else "recompute",
        record_rollouts=False,
    )
    world = World.of(spec, NullRecorder())
    loop, version = world.loop, question.present.version
    loop.pool.line.believe(question.belief)
    loop.pool.line.beside(question.trainer_share)
    fill(loop.pool, question.present, plans.task_of)
    _put_off(loop, plans, question)
    world.stages.trainer.version = version
    for engine, seat in zip(world.engines, loop.pool.engines(), strict=True):
        await engine.pause("keep")
        await engine.begin_update(version)
        await engine.commit_update(version, 0)
        await engine.resume()
        loop.pool.seating[seat.name].version = version
    counting = StepTotals(world.stages, spec.steps)
    await world.run(counting)
    return counting.forecast(candidate, skip)


def _put_off(loop: RolloutLoop, plans: _NowPlans, question: Question) -> None:
    """The tasks put off, and what the run knows of its prompts' past."""
    late: list[tuple[int, int]] = []
    if question.known is not None:
        told = Foretold(question.known, plans.lengths_of, question.seed)
        loop.memory.history = told
        loop.pool.defer_above = loop.memory.defer_above
        late = list(told.launches_like(question.known.deferred))
    for launch, since in late:
        loop.pool.deferred.append(Deferred(_task("late", launch, question.present.prompt), since))
    for place in range(question.present.deferred - len(late)):
        loop.pool.put_off(_task("late", -1 - TRIED * len(late) - place, question.present.prompt))


def _task(kind: str, launch: int, prompt: int) -> Task:
    return Task(id=f"{kind}:{launch}", prompt_ids=range(prompt), extra={"launch": launch, "key": launch})


class _NowPlans(Plans):
    """Plans of the rollouts to come, and of those that are on their way: what they still make is drawn from the belief,
    given how far they have come and how long their siblings were."""

    def __init__(self, question: Question) -> None:
        super().__init__(question.demand, question.seed, turns=question.turns)
        self._question = question
        self._given: dict[int, list[Plan]] = {}

    def task_of(self, gid: int, live: LiveGroup) -> Task:
        """The task of a group that is on its way."""
        done = [member.tokens for member in live.members if member.done]
        logs = Siblings(len(done), _log_sum(done))
        question = self._question
        plans: list[Plan] = []
        for number, member in enumerate(live.members):
            if member.done:
                plans.append(((member.tokens,), ()))
                continue
            u = uniform(question.seed, "remaining", gid, number)
            left = max(1, round(sample_remaining(question.belief, member.tokens, logs, live.history, u)))
            end = member.tokens + left
            plans.append(_rest(end, question.tool_s * left if question.turns else None))
        self._given[gid] = plans
        return _task("now", -1_000_000 - gid, live.prompt)

    def lengths_of(self, launch: int) -> list[int]:
        """Of the group that a launch makes when it is first attempted."""
        size = self._question.settings.group_size
        return [self.demand.length(self._question.seed, launch, member, launch) for member in range(size)]

    def of(self, entry: RolloutEntry) -> Plan:
        given = self._given.get(entry.group.id)
        if given is None and entry.group.long and self._is_first(entry.group):
            given = self._given[entry.group.id] = self._first(entry.group.task)
        if given is not None and entry.member < len(given):
            return given[entry.member]
        return super().of(entry)

    def _is_first(self, group: GroupEntry) -> bool:
        """A prompt put off by its past has not been attempted: it makes what its past was drawn for."""
        return self._question.known is not None and 2 * group.task.extra["launch"] not in self._held

    def _first(self, task: Task) -> list[Plan]:
        launch, key = task.extra["launch"], task.extra["key"]
        drawn = (self._drawn(launch, key, member) for member in range(self._question.settings.group_size))
        return [((plan,), ()) if isinstance(plan, int) else plan for plan in drawn]


def _rest(end: int, tool_s: float | None) -> Plan:
    """What a rollout on its way still does: it stops at `end` tokens; with tools, after all their seconds at once."""
    if tool_s is None:
        return (end,), ()
    return (end, end + 1), (Turn(end, 0, tool_s), Turn(1, 0, 0.0))


def _log_sum(lengths: Sequence[int]) -> float:
    return sum(math.log(max(1, length)) for length in lengths)


class StepTotals(Controller):
    """A controller that keeps totals of each step instead of records; `learns`: somebody looks at each step's metrics
    (a `Chooser`), so the few of them that it reads are made."""

    def __init__(self, stages: Stages, steps: int, *, learns: bool = False) -> None:
        super().__init__(stages, steps=steps)
        self._learns = learns
        self._rows: list[tuple[float, int, int, int, int]] = []

    def _record(self, facts: StepFacts) -> dict[str, object]:
        trained = masked = stale = 0
        version = facts.batch.version
        freshness = facts.freshness
        for group in facts.groups:
            for member in group.usable():
                for segment in member.segments:
                    if segment.kind is not TokenKind.MODEL:
                        continue
                    age = version - segment.version
                    if freshness is not None and freshness.masks(age):
                        masked += len(segment)
                    else:
                        trained += len(segment)
                        stale = max(stale, age)
        dropped = sum(m.tokens for group, _ in facts.dropped for m in group.members)
        self._rows.append((facts.seconds["step"], trained, masked, dropped, stale))
        if not self._learns:
            return {}
        seconds = {f"time/{name}_s": value for name, value in facts.seconds.items()}
        return {**seconds, "tokens/batch_trained": trained, "waste/masked_share": masked / max(1, trained + masked)}

    def forecast(self, candidate: SchedulingPolicy, skip: int) -> Forecast:
        """The totals after the first `skip` steps."""
        rows = self._rows[skip:] or self._rows
        if not rows:
            return Forecast(candidate=candidate, failed="no step came to its end")
        seconds = sum(row[0] for row in rows)
        trained, masked, dropped = (sum(row[i] for row in rows) for i in (1, 2, 3))
        return Forecast(
            candidate=candidate,
            tokens_s=trained / seconds if seconds else 0.0,
            groups_s=len(rows) * self.stages.loop.settings.batch_groups / seconds if seconds else 0.0,
            step_s=fmean(row[0] for row in rows),
            waste=(masked + dropped) / max(1, trained + masked + dropped),
            staleness=max(row[4] for row in rows),
            per_step=tuple((row[1], row[0]) for row in rows),
        )
