"""A step under each placement: who waits for whom, how long it takes, and how much of the machine that uses.

    colocated       all GPUs generate, hand over, score and train, publish, hand over
    disaggregated   strictly on-policy on two sides: the trainer takes finished groups while the tail runs
    async           both sides at once, tokens at most k versions old
    elastic         as async (or disaggregated where k = 0), and trainer GPUs generate while they would wait

Utilisation is work over machine: GPU-seconds that the stages need at their assumed efficiency, over all GPUs times the
step. The ceiling is the same where nothing has a tail and nobody waits but for publishes and hand-overs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import islice
from math import hypot
from typing import NamedTuple

from gruppetto.errors import UserError
from gruppetto.ledger.figure import Figure
from gruppetto.ledger.generation import LAYERED, Forecast, Schedule, asynchronous, ideal
from gruppetto.ledger.generation.spread import together_s
from gruppetto.ledger.layouts.found import NothingFits
from gruppetto.ledger.plan import stages
from gruppetto.ledger.plan.ask import Ask
from gruppetto.ledger.plan.sides import RolloutSide, Sides
from gruppetto.ledger.plan.stages import Stage
from gruppetto.ledger.plan.trainer_side import TrainerSide
from gruppetto.ledger.transfers.switch import Switch, switch
from gruppetto.ledger.transfers.sync import Sync, sync

MANY_SPLITS = 17
"""Splits up to which each is looked at: sixteenths. Bounds do not always fall and rise only once, and of so few the
next one may be far off."""
LOOKS = 2
"""Splits that tell whether any fits."""
TRIED = 2
"""Splits, the best by an estimate of the step, whose expected step is made."""
CLOSE = 0.01
"""By how much more the estimate of the second may be."""


class Placed(NamedTuple):
    """One placement of a run. Seconds of a step; GPU-seconds over all GPUs."""

    name: str
    gpus: int
    rollout: RolloutSide
    trainer: TrainerSide
    schedule: Schedule
    forecast: Forecast
    generate: Stage
    sync: Sync
    switch: Switch | None
    step_s: Figure
    ideal_s: Figure
    """Without a tail, and without waits but for publishes and hand-overs."""
    staleness: Figure
    """Age of a trained token at most, in versions."""
    tokens: float
    """Model tokens of a batch."""
    trained_tokens: float
    """With prompts and observations."""
    lent_s: float = 0.0
    """Seconds of a step in which trainer GPUs generate (elastic)."""

    @property
    def colocated(self) -> bool:
        return self.name == "colocated"

    @property
    def handing(self) -> int:
        """GPUs that hand their memory over, where any do: lent ones, or all."""
        return self.gpus if self.colocated else self.trainer.used

    @property
    def gpu_hours(self) -> float:
        """Of a step, idle GPUs with the others."""
        return self.gpus * self.step_s.value / 3600

    @property
    def work_gpu_s(self) -> float:
        """GPU-seconds that all stages need at the assumed efficiency."""
        return self.generate.gpu_s.value + self.trainer.gpu_s

    @property
    def utilization(self) -> Figure:
        """Work over machine."""
        return self._share(self.step_s.value)

    @property
    def ceiling(self) -> Figure:
        """The same at the ideal step."""
        return self._share(self.ideal_s.value)

    def _share(self, step_s: float) -> Figure:
        text = f"({self.generate.gpu_s.value:,.0f} + {self.trainer.gpu_s:,.0f}) GPU-s / ({self.gpus} x {step_s:,.1f} s)"
        return Figure(self.work_gpu_s / (self.gpus * step_s), "", text)


class Placements:
    """Makes placements of one ask; sides are shared between them."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.sides = Sides(ask)
        self._known: dict[tuple[str, int], Placed] = {}

    def place(self, name: str, rollout_gpus: int | None = None) -> Placed:
        """One placement; what is not colocated on `rollout_gpus` GPUs for rollouts, or the best number of them."""
        if name == "colocated":
            return self._colocated()
        if self.ask.gpus < 2:
            raise UserError(f"{name} needs two GPUs, one for each side, and there is 1; write --gpus 2 or colocated")
        if name == "async" and not self.ask.max_staleness:
            raise UserError(
                "async with max_staleness = 0: nothing may overlap; write --max-staleness 1 or disaggregated"
            )
        if rollout_gpus is None:
            rollout_gpus = self.best_split(name)
        if name == "elastic":
            return self._elastic(rollout_gpus)
        return self._apart(name, rollout_gpus)

    # -- the kinds ----------------------------------------------------------------------------------------------------

    def _colocated(self) -> Placed:
        ask, gpus = self.ask, self.ask.gpus
        rollout = self.sides.rollout(gpus, colocated=True)
        stays = sum(rollout.memory.parts[owner].value for owner in ("context", "communication", "graphs"))
        trainer = self.sides.trainer(gpus, stays)
        handed = switch(
            ask.model,
            trainer.layout,
            rollout.layout,
            ask.gpu,
            sleep=ask.sleep,
            dtype=ask.serve_dtype,
            kv_pool=rollout.memory.pool,
            guests=_guests(trainer),
            asleep=stays,
            efficiency=ask.efficiency,
        )
        published = self._sync(rollout, trainer, "ipc")
        timing = self.sides.timing(trainer, published.expected.value, handed.seconds.value)
        found = self.sides.expected(rollout, timing, LAYERED)
        generate = stages.generate(ask, self.sides.engines(rollout), rollout.layout)
        ideal_s = found.ideal_s.value + trainer.seconds + published.expected.value + handed.seconds.value
        return Placed(
            name="colocated",
            gpus=gpus,
            rollout=rollout,
            trainer=trainer,
            schedule=LAYERED,
            forecast=found,
            generate=generate,
            sync=published,
            switch=handed,
            step_s=found.step_s,
            ideal_s=Figure(
                ideal_s,
                "s",
                f"generate {found.ideal_s.value:,.0f} + train and score {trainer.seconds:,.0f} + publish "
                f"{published.expected.value:,.1f} + hand-over {handed.seconds.value:,.1f} s",
            ),
            staleness=Figure(0.0, "versions", "strictly on-policy"),
            tokens=ask.rollouts.tokens,
            trained_tokens=ask.rollouts.trained_tokens,
        )

    def _apart(self, name: str, rollout_gpus: int) -> Placed:
        """Two sides; made once for each split."""
        if (name, rollout_gpus) not in self._known:
            self._known[name, rollout_gpus] = self._two_sides(name, rollout_gpus)
        return self._known[name, rollout_gpus]

    def _two_sides(self, name: str, rollout_gpus: int) -> Placed:
        ask = self.ask
        schedule = self.schedule(name)
        rollout = self.sides.rollout(rollout_gpus, schedule=schedule)
        trainer = self.sides.trainer(ask.gpus - rollout_gpus)
        published = self._sync(rollout, trainer, "network" if ask.gpus > ask.gpu.gpus_per_node else "node")
        timing = self.sides.timing(trainer, published.expected.value, 0.0)
        found = self.sides.expected(rollout, timing, schedule)
        both = max(found.ideal_s.value, trainer.seconds)
        return Placed(
            name=name,
            gpus=ask.gpus,
            rollout=rollout,
            trainer=trainer,
            schedule=schedule,
            forecast=found,
            generate=stages.generate(ask, self.sides.engines(rollout), rollout.layout, schedule.depth),
            sync=published,
            switch=None,
            step_s=found.step_s,
            ideal_s=Figure(
                both + published.expected.value,
                "s",
                f"max(generate {found.ideal_s.value:,.0f}, train and score {trainer.seconds:,.0f}) + publish "
                f"{published.expected.value:,.1f} s",
            ),
            staleness=_staleness(schedule),
            tokens=ask.rollouts.tokens,
            trained_tokens=ask.rollouts.trained_tokens,
        )

    def _elastic(self, rollout_gpus: int) -> Placed:
        """Trainer GPUs that would wait generate meanwhile. A, the rollouts' GPU-seconds at the rate of the fixed split,
        is spread: s R + (s - t - w) T = A, for t seconds of training and w of hand-overs."""
        base = self._apart("async" if self.ask.max_staleness else "disaggregated", rollout_gpus)
        handed = switch(
            self.ask.model,
            base.trainer.layout,
            base.rollout.layout,
            self.ask.gpu,
            sleep=self.ask.sleep,
            dtype=self.ask.serve_dtype,
            guests=_guests(base.trainer),
            efficiency=self.ask.efficiency,
        )
        engines, trainers, k = base.rollout.used, base.trainer.used, self.ask.max_staleness
        area = base.forecast.rollout_s.value * engines
        busy_s = base.trainer.seconds + handed.seconds.value
        least = max(busy_s, base.forecast.critical_s.value / (k + 1))
        shared = max(least, (area + trainers * busy_s) / (engines + trainers)) + base.sync.expected.value
        if shared >= base.step_s.value:
            step, lent = base.step_s, 0.0
            step = Figure(step.value, "s", f"{step.formula}; lending would not pay")
        else:
            lent = max(0.0, shared - busy_s - base.sync.expected.value)
            step = Figure(
                shared,
                "s",
                f"({area:,.0f} GPU-s of rollouts + {trainers} x ({base.trainer.seconds:,.0f} s of training + "
                f"{handed.seconds.value:,.1f} s of hand-overs)) / {engines + trainers} GPUs + publish "
                f"{base.sync.expected.value:,.1f} s, at least {least:,.0f} s",
            )
        return Placed(
            name="elastic",
            gpus=base.gpus,
            rollout=base.rollout,
            trainer=base.trainer,
            schedule=base.schedule,
            forecast=base.forecast,
            generate=base.generate,
            sync=base.sync,
            switch=handed if lent else None,
            step_s=step,
            ideal_s=Figure(min(base.ideal_s.value, step.value), "s", base.ideal_s.formula),
            staleness=base.staleness,
            tokens=base.tokens,
            trained_tokens=base.trained_tokens,
            lent_s=lent,
        )

    # -- parts --------------------------------------------------------------------------------------------------------

    def schedule(self, name: str) -> Schedule:
        """The scheduling of a placement that is not colocated."""
        if name == "disaggregated":
            return Schedule(colocated=False, stream=True, count_kv=True, probes=True)
        return asynchronous(self.ask.max_staleness, self.ask.depth)

    def _sync(self, rollout: RolloutSide, trainer: TrainerSide, route: str) -> Sync:
        return sync(
            self.ask.model,
            trainer.layout,
            rollout.layout,
            self.ask.gpu,
            how=self.ask.sync_how,
            route=route,  # type: ignore[arg-type]
            dtype=self.ask.serve_dtype,
            engines=rollout.count,
            efficiency=self.ask.efficiency,
        )

    # -- the split ----------------------------------------------------------------------------------------------------

    def splits(self) -> list[int]:
        """Numbers of rollout GPUs worth a look: sixteenths of all, whole nodes where there are many."""
        gpus, unit = self.ask.gpus, self._unit()
        return [count for count in range(unit, gpus, unit) if self.fits(count)]

    def _unit(self) -> int:
        gpus, node = self.ask.gpus, self.ask.gpu.gpus_per_node
        return node * max(1, gpus // (32 * node)) if gpus >= 16 * node else max(1, gpus // 16)

    def fits(self, rollout_gpus: int) -> bool:
        """Whether both sides have a layout."""
        return _made(self.sides.rollout, rollout_gpus) and _made(self.sides.trainer, self.ask.gpus - rollout_gpus)

    def can_place(self, name: str) -> bool:
        """Whether there are layouts for it, as far as a few looks tell: engines on the fewest GPUs that hold one leave
        a trainer the most. What is said to fit does."""
        if name == "colocated":
            return _made(self._colocated)
        gpus, unit = self.ask.gpus, self._unit()
        serving = (count for count in range(unit, gpus, unit) if _made(self.sides.rollout, count))
        return any(self.fits(count) for count in islice(serving, LOOKS))

    def best_split(self, name: str) -> int:
        """The split with the shortest step: an estimate ranks all, expectations decide between two that are close."""
        if self.ask.split is not None:
            return self.ask.split[0]
        ranked = self._best(name, self._promising(name), TRIED)
        if not ranked:
            self.place_or_say(name)
        kind = "async" if name == "elastic" and self.ask.max_staleness else name
        kind = "disaggregated" if kind == "elastic" else kind
        close_s = (1 + CLOSE) * self._about_s(name, ranked[0])
        close = [count for count in ranked if self._about_s(name, count) <= close_s]
        return close[0] if len(close) == 1 else min(close, key=lambda count: self._apart(kind, count).step_s.value)

    def _promising(self, name: str) -> Iterable[int]:
        """Of few splits all; of many every fourth, and what lies between the best of them and its neighbours: the
        estimate falls to one side's limit and rises from there, and each split costs a search of layouts."""
        gpus, unit = self.ask.gpus, self._unit()
        all_of_them = range(unit, gpus, unit)
        if gpus // unit <= MANY_SPLITS:
            return all_of_them
        coarse = range(4 * unit, gpus, 4 * unit)
        for best in self._best(name, coarse, 1):
            return {*coarse, *range(max(unit, best - 3 * unit), min(gpus, best + 4 * unit), unit)}
        return all_of_them

    def _best(self, name: str, counts: Iterable[int], most: int) -> list[int]:
        """Of `counts` those with the lowest estimates, best first, at most so many, where both sides have a layout.
        Each is looked at more closely only while it may be among them: to lay out a side takes a search."""
        looks = (self._computing_s, self._engines_s, self._about_s)
        left, found = [(0.0, count, 0) for count in counts], list[int]()
        heapify(left)
        while left and len(found) < most:
            _, count, looked = heappop(left)
            if looked == len(looks):
                found.append(count)
                continue
            try:
                heappush(left, (looks[looked](name, count), count, looked + 1))
            except UserError:
                continue
        return found

    def place_or_say(self, name: str) -> None:
        """Raises the `UserError` that says why no split fits."""
        try:
            self.sides.rollout(self.ask.gpus - 1)
            self.sides.trainer(self.ask.gpus - 1)
        except NothingFits as error:
            raise error.within(name) from None
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        why = f"{name}: {self.ask.model.name} fits each side alone but no split of {self.ask.gpus} GPUs into two"
        raise NothingFits(lambda: why, lambda: "write --compare colocated or more --gpus")

    def _about_s(self, name: str, rollout_gpus: int) -> float:
        """An estimate of the step: the work at its best rate and what the longest rollout, among the others, leaves of
        k + 1 steps, as an engine is chosen by (`serve_score`); training beside them, or, where the trainer streams what
        has ended, the root of the sum of the squares."""
        return self._both_s(name, rollout_gpus, self.sides.trainer(self.ask.gpus - rollout_gpus).seconds)

    def _engines_s(self, name: str, rollout_gpus: int) -> float:
        """The least that it is with any layout of the trainer."""
        return self._both_s(name, rollout_gpus, self.sides.trainers.least_s(self.ask.gpus - rollout_gpus))

    def _computing_s(self, name: str, rollout_gpus: int) -> float:
        """The least that it is with any layouts."""
        return self.sides.trainers.least_s(self.ask.gpus - rollout_gpus)

    def _both_s(self, name: str, rollout_gpus: int, train_s: float) -> float:
        schedule = self.schedule(name if self.ask.max_staleness else "disaggregated")
        engines = self.sides.engines(self.sides.rollout(rollout_gpus, schedule=schedule))
        work_s = ideal(self.ask.rollouts, engines, schedule.depth).value
        longest_s = together_s(self.ask.rollouts, engines) / (schedule.max_staleness + 1)
        if schedule.max_staleness:
            return max(hypot(work_s, longest_s), train_s)
        return hypot(work_s, longest_s, train_s)


def _made(make: Callable[..., object], *given: int) -> bool:
    """Whether it can be."""
    try:
        make(*given)
    except UserError:
        return False
    return True


def _guests(trainer: TrainerSide) -> list[tuple[str, float, float]]:
    """Who leaves the trainer's GPUs with the policy; those that take turns are in host memory already."""
    return [(seat.name, seat.comes, seat.goes) for seat in trainer.seats if seat.resident]


def _staleness(schedule: Schedule) -> Figure:
    """What the schedule promises; how old tokens are on average depends on what waits for what."""
    k = schedule.max_staleness
    if not k:
        return Figure(0.0, "versions", "strictly on-policy")
    return Figure(float(k), "versions", f"at most: no token older than {k} versions is trained")
