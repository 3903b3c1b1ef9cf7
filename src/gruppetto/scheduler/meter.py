"""Where every engine-second of a step went, and what the engines did: decode steps by live rows.

Owns the differences between snapshots of engine counters and the integrals of empty slots by cause. Promises: the
causes add up exactly to engines x seconds since `open` (whole numbers of ticks, 2**-20 s, which floats add without
rounding); a note costs the same for one engine as for thousands. In lockstep the split of decode steps is exact.

How an engine-second is split. Busy comes from the engine's own clock: prefill whole, and of a decode second with b of B
slots live b/B. Train, sync and switch are phases of all engines, on the loop's clock; where an engine was still busy in
one, it counts as busy. An evaluation is a phase too, whole: what engines do in it is no work of the step, and is kept
apart (`evaluated`) for who wants to know how fast they are. What is left of decode and of the generate phase are empty
slots: first those that the engine itself held back for KV, the rest in proportion to the loop's integrals:

    queue    something was queued, or on an engine, and the engine was not decoding it
    kv_full  something was queued and slots were free, but it did not fit into KV
    tool     the rollout that would use the slot was in a tool call
    reward   nothing ran; the last rewards were awaited
    trainer  all that may be launched is finished and only the trainer makes room, or the next batch waits for it with
             nothing left to start (and the train phase)
    tail     nothing was left to start, and the last rollouts still ran

`lost` is the decode time of tokens that were thrown away, and all seconds of an engine from its death to its return.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec import structs

from gruppetto.clock import now
from gruppetto.engines.base import Engine, EngineStats
from gruppetto.record.account import apportion

TICKS = 1 << 20
"""Ticks of a second; a power of two, so that seconds in ticks are exact as floats."""

CAUSES = (
    "decode", "prefill", "tail", "tool", "reward", "sync", "switch", "trainer", "kv_full", "queue", "eval", "lost",
)  # fmt: skip

MAX_SNAPSHOTS = 20_000
"""Engine snapshots a step for `queued_steps`; with more changes of the queue than that, their split stays as it was."""

Phase = Literal["generate", "train", "sync", "switch", "eval"]
_PHASE_CAUSE = {"train": "trainer", "sync": "sync", "switch": "switch", "eval": "eval"}
_EMPTY = ("tail", "tool", "reward", "trainer", "kv_full", "queue")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork:
    """One engine's share of a step.

    `batch_steps[b]` counts decode steps with b live rows, `queued_steps[b]` those of them with a queue, `batch_s[b]` is
    the seconds they took (empty where the engine does not say).
    """

    engine: str
    slots: int
    batch_steps: Mapping[int, int]
    queued_steps: Mapping[int, int]
    decode_s: float
    prefill_s: float
    prefill_tokens: int
    batch_s: Mapping[int, float] = field(default_factory=dict)
    kv_wait_row_s: float = 0.0

    @property
    def decode_steps(self) -> int:
        return sum(self.batch_steps.values())

    @property
    def row_steps(self) -> int:
        """Tokens that its decode steps made, at one a row and step."""
        return sum(rows * count for rows, count in self.batch_steps.items())

    @property
    def fill(self) -> float:
        """Share of its slots that were live, over its decode seconds; 0 when it did not decode."""
        weights = self.batch_s or self.batch_steps
        total = sum(weights.values()) * self.slots
        return sum(rows * weight for rows, weight in weights.items()) / total if total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What all engines did in a step. `ticks` has every one of `CAUSES` and sums to `total_ticks`."""

    engines: tuple[EngineWork, ...]
    ticks: Mapping[str, int]
    wall_ticks: int
    generate_ticks: int
    evaluated: tuple[EngineWork, ...] = ()
    """What engines did in an evaluation: in none of the others."""

    @property
    def timed(self) -> tuple[EngineWork, ...]:
        """All that tells how fast engines are, evaluations too: their batches have other sizes."""
        return (*self.engines, *self.evaluated)

    @property
    def total_ticks(self) -> int:
        """Engines x wall."""
        return self.wall_ticks * len(self.engines)

    @property
    def generate_s(self) -> float:
        """Seconds of the step in which the engines as a whole were free to generate."""
        return self.generate_ticks / TICKS

    def seconds(self) -> dict[str, float]:
        """Engine-seconds by cause; as floats they add up to `total` exactly, in any order."""
        return {"total": self.total_ticks / TICKS, **{cause: self.ticks[cause] / TICKS for cause in CAUSES}}


class StepMeter:
    """Opened at the start of a step, told what changes, read at its end."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._has_queue = False
        self._phase: str = "generate"
        self._empty: tuple[tuple[str, int], ...] = ()
        self._state: tuple[int | bool, ...] = ()
        self._dead: dict[str, dict[str, int]] = {}
        self._missed: dict[str, Counter[str]] = {}
        self.generated: Counter[str] = Counter()
        self.open()

    def open(self) -> None:
        """A step begins. Engines that are dead stay so, and the phase goes on."""
        self._first = [engine.stats() for engine in self._engines]
        self._last = list(self._first)
        self._with_queue: list[Counter[int]] = [Counter() for _ in self._engines]
        self._snapshots = 0
        self._since = _ticks(now())
        self._phases: Counter[str] = Counter()
        self._empties: Counter[str] = Counter()
        self._lost_tokens = 0
        self._dead = {name: {} for name in self._dead}
        self._missed = {}
        self._evaluated: list[EngineWork] = []
        self._slots = self._alive_slots()
        self.generated = Counter()

    def note(
        self,
        queued: int = 0,
        *,
        running: int = 0,
        free_slots: int = 0,
        kv_blocked: bool = False,
        waiting: int = 0,
        scoring: int = 0,
        training: bool = False,
        starved: bool = False,
        behind: bool = False,
    ) -> None:
        """Called after every decision with what holds from now on. O(1).

        `running` rollouts on engines, `queued` that may start, `free_slots` that the scheduler could still fill (0:
        what is queued waits for a slot, not for a decision), `kv_blocked`: it does not fit into KV, `waiting` in a tool
        call, `scoring` with the reward, `training`: a batch is with the trainer, `starved`: all that may be launched is
        finished and only the trainer can make room, `behind`: the whole next batch is ready and waits for the trainer.
        """
        state = (queued, running, free_slots, kv_blocked, waiting, scoring, training, starved, behind)
        if state == self._state:
            return
        self._advance()
        self._state = state
        empty = max(0, self._slots - running)
        if starved:
            self._empty = (("trainer", empty),)
        else:
            held = min(empty, queued) if free_slots > 0 else 0
            tool = min(empty - held, waiting)
            rest = "trainer" if behind else _rest(running, waiting, scoring, training)
            self._empty = (("kv_full" if kv_blocked else "queue", held), ("tool", tool), (rest, empty - held - tool))
        if (queued > 0) != self._has_queue:
            self._book()
            self._has_queue = queued > 0

    def phase(self, name: Phase) -> None:
        """From now on the engines as a whole are in this phase."""
        self._advance()
        if name == "eval" and self._phase != "eval":
            self._book(always=True)
        elif name != "eval" and self._phase == "eval":
            self._leave_out()
        self._phase = name

    def died(self, engine: str) -> None:
        """From now on this engine's seconds are lost, in this step and in all that follow."""
        self._advance()
        if engine not in self._dead:
            self._dead[engine] = dict(self._phases)
            self._slots = self._alive_slots()
            self._state = ()

    def came_back(self, engine: str) -> None:
        """A dead engine lives again; its seconds from its death to here are lost."""
        self._advance()
        before = self._dead.pop(engine, None)
        if before is not None:
            missed = self._missed.setdefault(engine, Counter())
            missed.update({phase: ticks - before.get(phase, 0) for phase, ticks in self._phases.items()})
            self._slots = self._alive_slots()
            self._state = ()

    def lost(self, tokens: int) -> None:
        """Generated tokens were thrown away: they cost this step's price of a token, at most all of its decode time."""
        self._lost_tokens += tokens

    def read(self) -> StepWork:
        """What the engines did since `open`."""
        self._advance()
        self._book(always=True)
        engines = tuple(
            _work(engine.name, first, last, queued)
            for engine, first, last, queued in zip(
                self._engines, self._first, self._last, self._with_queue, strict=True
            )
        )
        return StepWork(
            engines=engines,
            ticks=self._split(engines),
            wall_ticks=sum(self._phases.values()),
            generate_ticks=self._phases["generate"],
            evaluated=tuple(self._evaluated),
        )

    # -- inside -------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Books the time since the last call under what held until now."""
        at = _ticks(now())
        passed, self._since = at - self._since, at
        if not passed:
            return
        self._phases[self._phase] += passed
        if self._phase == "generate":
            for cause, slots in self._empty:
                self._empties[cause] += slots * passed

    def _book(self, always: bool = False) -> None:
        """Decode steps since the last booking, under whether there was a queue."""
        if not always and self._snapshots >= MAX_SNAPSHOTS:
            return
        self._snapshots += len(self._engines)
        stats = [engine.stats() for engine in self._engines]
        if self._has_queue:
            for queued, before, after in zip(self._with_queue, self._last, stats, strict=True):
                queued.update(_difference(before.batch_steps, after.batch_steps))
        self._last = stats

    def _leave_out(self) -> None:
        """What the engines have done since the last booking, an evaluation, is in no difference of this step."""
        stats = [engine.stats() for engine in self._engines]
        for i, (engine, before, after) in enumerate(zip(self._engines, self._last, stats, strict=True)):
            self._evaluated.append(_work(engine.name, before, after, Counter()))
            self._first[i] = _moved(self._first[i], before, after)
        self._last = stats

    def _alive(self, engine: str) -> Mapping[str, int]:
        """Ticks by phase in which it lived."""
        phases, missed = self._dead.get(engine, self._phases), self._missed.get(engine)
        if missed is None:
            return phases
        return {phase: ticks - missed[phase] for phase, ticks in phases.items()}

    def _alive_slots(self) -> int:
        pairs = zip(self._engines, self._first, strict=True)
        return sum(stats.slots for engine, stats in pairs if engine.name not in self._dead)

    def _split(self, engines: Sequence[EngineWork]) -> dict[str, int]:
        """All engine-ticks by cause."""
        ticks = dict.fromkeys(CAUSES, 0)
        wall, empty, empty_slots = sum(self._phases.values()), 0, 0
        for work in engines:
            phases = self._alive(work.engine)
            share = _engine_ticks(work, phases, wall)
            idle = share.pop("empty")
            empty += idle
            empty_slots += idle * work.slots
            for cause, amount in share.items():
                ticks[cause] += amount
        weights = [self._empties[cause] for cause in _EMPTY]
        weights[-1] += max(0, empty_slots - sum(weights))  # nobody's, by the loop: it was on an engine that stood still
        for cause, amount in zip(_EMPTY, apportion(empty, weights), strict=True):
            ticks[cause] += amount
        made = sum(work.row_steps for work in engines)
        lost = ticks["decode"] * min(self._lost_tokens, made) // made if made else 0
        ticks["decode"] -= lost
        ticks["lost"] += lost
        return ticks


def _rest(running: int, waiting: int, scoring: int, training: bool) -> str:
    """Whose the slots are that nobody is there to fill."""
    if running:
        return "tail"
    if scoring:
        return "reward"
    if waiting:
        return "tool"
    return "trainer" if training else "tail"


def _engine_ticks(work: EngineWork, phases: Mapping[str, int], wall: int) -> dict[str, int]:
    """One engine's ticks by cause, `empty` for what is to be split further; they add up to `wall`."""
    alive = sum(phases.values())
    decode, prefill = _ticks(work.decode_s), _ticks(work.prefill_s)
    if decode + prefill > alive:  # two clocks; the busy one may not claim more than there was
        decode, prefill = apportion(alive, [decode, prefill])
    paused = {name: phases.get(name, 0) for name in _PHASE_CAUSE}
    room = alive - decode - prefill
    if sum(paused.values()) > room:  # it was still busy when the phase had begun
        paused = dict(zip(paused, apportion(room, list(paused.values())), strict=True))
    full = min(decode, round(decode * work.fill))
    empty = alive - full - prefill - sum(paused.values())
    kv_full = min(empty, _ticks(work.kv_wait_row_s / work.slots)) if work.slots else 0
    ticks = {"decode": full, "prefill": prefill, "kv_full": kv_full, "empty": empty - kv_full, "lost": wall - alive}
    for name, amount in paused.items():
        ticks[_PHASE_CAUSE[name]] = amount
    return ticks


def _ticks(seconds: float) -> int:
    return round(seconds * TICKS)


def _difference(before: Mapping[int, int], after: Mapping[int, int]) -> dict[int, int]:
    return {rows: count - before.get(rows, 0) for rows, count in after.items() if count != before.get(rows, 0)}


def _moved(first: EngineStats, before: EngineStats, after: EngineStats) -> EngineStats:
    """`first`, with what was counted between the other two added: a difference to it is without that."""
    counters = {
        name: getattr(first, name) + getattr(after, name) - getattr(before, name)
        for name in ("decode_s_total", "prefill_s_total", "prefill_tokens_total", "kv_wait_row_s")
    }
    steps, seconds = dict(first.batch_steps), dict(first.batch_s)
    for rows, count in after.batch_steps.items():
        steps[rows] = steps.get(rows, 0) + count - before.batch_steps.get(rows, 0)
    for rows, took in after.batch_s.items():
        seconds[rows] = seconds.get(rows, 0.0) + took - before.batch_s.get(rows, 0.0)
    return structs.replace(first, batch_steps=steps, batch_s=seconds, **counters)


def _work(name: str, first: EngineStats, last: EngineStats, queued: Counter[int]) -> EngineWork:
    return EngineWork(
        engine=name,
        slots=last.slots,
        batch_steps=_difference(first.batch_steps, last.batch_steps),
        queued_steps=dict(queued),
        decode_s=last.decode_s_total - first.decode_s_total,
        prefill_s=last.prefill_s_total - first.prefill_s_total,
        prefill_tokens=last.prefill_tokens_total - first.prefill_tokens_total,
        batch_s={
            rows: seconds - first.batch_s.get(rows, 0.0)
            for rows, seconds in last.batch_s.items()
            if last.batch_steps.get(rows, 0) != first.batch_steps.get(rows, 0)
        },
        kv_wait_row_s=last.kv_wait_row_s - first.kv_wait_row_s,
    )
