"""The training loop: knows contracts only.

    next_part ──groups──▶ build_batch ──samples──▶ trainer ──weights──▶ channel ──▶ engines ──▶ published
        ▲ waits for ready groups    (forward_backward each part,       (paused meanwhile)             │
        │                            optim_step once a batch)                                         │
        └─────────────────────────────────────────────────────────────────────────────────────────────┘

What each part waits for: `next_part` for enough ready groups; the trainer for a part; the channel for the trainer; the
next step for the publish. Where engines and trainer share machines, a batch is handed out when the engines are idle,
and they stay so until the publish; otherwise rollouts go on meanwhile. Promises: a step is recorded
once, after its weights are on the engines; an interruption ends within one micro-batch or one decode step, with a
checkpoint of the last whole step and of every rollout alive; a failing part ends the run, named, with the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from gruppetto.buffer.batch import Advantages, build_batch, joined
from gruppetto.checkpoint import Checkpoints
from gruppetto.clock import now
from gruppetto.engines.base import Engine
from gruppetto.errors import RunError
from gruppetto.evaluation import EvalResult, Evaluator
from gruppetto.publishing import Publisher
from gruppetto.record.base import Recorder
from gruppetto.record.bounds import RateModel
from gruppetto.rewards.base import Reward
from gruppetto.scheduler.entries import GroupEntry
from gruppetto.scheduler.loop import Part, RolloutLoop
from gruppetto.scheduler.meter import StepWork
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.step_record import Decode, LengthLedger, StepClock, StepFacts, rollout_rows, step_metrics
from gruppetto.trainer.base import Trainer
from gruppetto.types import Batch
from gruppetto.weights.base import WeightChannel

T = TypeVar("T")


class Chooser(Protocol):
    """Looks at each step and may change the loop's scheduling policy."""

    def begin(self) -> None:
        """Before the first step."""
        ...

    async def after_step(self, metrics: Mapping[str, Any], work: StepWork, processed: int) -> None:
        """After a step was recorded. `work`: what the engines did; `processed`: tokens that the trainer read."""
        ...

    def state(self) -> Mapping[str, Any]:
        """JSON-able: what the run follows."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on with `state()`."""
        ...


BuildBatch = Callable[[Sequence[GroupEntry], int, Freshness, Advantages], Batch]
"""From closed groups, trainer version and freshness to a batch."""


class Interrupted(Exception):
    """The user asked the run to end; it has been saved."""


@dataclass(slots=True, kw_only=True)
class Stages:
    """The implementations that `assemble` picked."""

    engines: Sequence[Engine]
    reward: Reward
    trainer: Trainer
    channel: WeightChannel
    recorder: Recorder
    loop: RolloutLoop
    advantages: Advantages
    checkpoints: Checkpoints | None = None
    evaluator: Evaluator | None = None
    decode: Decode | None = None
    build_batch: BuildBatch = build_batch
    record_rollouts: bool = True
    kv_kept: bool = False
    """Engines keep the KV of older weights over a publish."""
    rates: RateModel | None = None
    """What is known of the engines' speed; None = measured from the run."""
    handover: Callable[[], Awaitable[None]] | None = None
    """Hands the machines' memory over, from engines to trainer and back (colocated); None where there is none."""
    restarts: int = 0
    """Times that a lost engine is brought back, where it can be."""
    chooser: Chooser | None = None
    """Picks the scheduling policy of the steps to come; None where it stays."""
    offsets: Any = None
    """() -> JSON-able position of the record, for checkpoints; None where there is no record."""


class Controller:
    """Runs `steps` optimizer steps over started stages."""

    def __init__(self, stages: Stages, *, steps: int, eval_every: int = 0, checkpoint_every: int = 0) -> None:
        self.stages, self.steps = stages, steps
        self._eval_every, self._checkpoint_every = eval_every, checkpoint_every
        self._stop = asyncio.Event()
        self._lengths = LengthLedger()
        self._weights = asyncio.Lock()
        """Held while weights change or are read."""
        self._publisher = Publisher(stages, self._weights)
        if stages.evaluator is not None:
            stages.evaluator.lost = stages.loop.engine_lost
        self._evaluated_at = -1

    @property
    def version(self) -> int:
        """Steps done; the version of the weights."""
        return self.stages.loop.pool.version

    def interrupt(self) -> None:
        """Asks the run to end; safe to call from a signal handler of the loop, and more than once."""
        self._stop.set()

    async def run(self) -> None:
        """Trains to the end of the steps or of the data. Raises `Interrupted` after saving when it was asked to end."""
        try:
            if self.stages.chooser is not None:
                self.stages.chooser.begin()
            if self.version == 0 or self._eval_due():
                await self._evaluate()
            self.stages.channel.take_counts()  # what was sent before the first step is none's
            while self.version < self.steps:
                self.stages.loop.open_step()
                if not await self._step():
                    break
            await self._evaluate()
            await self._save()
        except Interrupted:
            await self._save(wait_for_scores=False)
            raise
        except Exception:
            await self._save_if_possible()
            raise
        finally:
            await self._publisher.close()

    # -- one step -----------------------------------------------------------------------------------------------------

    async def _step(self) -> bool:
        """One optimizer step over the next batch, part by part as it comes; False when the data has ended."""
        loop, step = self.stages.loop, self.version + 1
        clock = StepClock()
        parts: list[Part] = []
        batches: list[Batch] = []
        try:
            while not (parts and parts[-1].closed):
                part = await self._unless_stopped(loop.next_part())
                clock.book("wait_for_batch")
                if part is None:
                    return False
                parts.append(part)
                await self._take_machines(parts, clock)
                batches.append(await self._train_on(part, step))
                clock.book("train")
            metrics = await self._optim_step(step)
            clock.book("train")
        except BaseException:
            await self._undo(parts)
            raise
        self._weigh_trainer(clock, streamed=len(parts) > 1)
        await self._finish_step(step, parts, joined(batches), metrics, clock)
        return True

    def _weigh_trainer(self, clock: StepClock, *, streamed: bool) -> None:
        """Tells the queue how much of the step the trainer beside it computed; in lockstep no clock decides."""
        loop, seconds = self.stages.loop, clock.seconds()
        if loop.settings.lockstep:
            return
        beside = streamed and not loop.pool.colocated and seconds["step"] > 0
        loop.pool.line.beside(seconds["train"] / seconds["step"] if beside else 0.0)

    async def _take_machines(self, parts: Sequence[Part], clock: StepClock) -> None:
        """Where engines and trainer share machines, the trainer gets idle ones with the first part of a batch, and the
        rest with the last: then engines rest."""
        loop, closed = self.stages.loop, parts[-1].closed
        if loop.pool.colocated and (closed or len(parts) == 1):
            await self._hand_over(rest=closed)
            clock.book("switch")
            if closed:
                loop.meter.phase("train")

    async def _train_on(self, part: Part, step: int) -> Batch:
        """Gradients of one part."""
        loop = self.stages.loop
        self._event("train_begin", step=step, groups=[group.id for group in part.groups])
        batch = self.stages.build_batch(part.groups, self.version, loop.policy.freshness, self.stages.advantages)
        await self._unless_stopped(self.stages.trainer.forward_backward(batch.samples, share=part.share))
        self._event("train_end", step=step)
        return batch

    async def _hand_over(self, *, rest: bool = True) -> None:
        """Machines go from engines to trainer, or back; without `rest` idle ones, while the others decode."""
        if self.stages.handover is not None:
            if rest:
                self.stages.loop.meter.phase("switch")
            await self.stages.handover()

    async def _optim_step(self, step: int) -> dict[str, Any]:
        async with self._weights:
            return dict(await self.stages.trainer.optim_step())

    async def _undo(self, parts: Sequence[Part]) -> None:
        """The optimizer step does not happen: its groups are ready again."""
        await self.stages.trainer.drop_gradients()
        self.stages.loop.give_back([group for part in parts for group in part.groups])

    async def _finish_step(
        self, step: int, parts: Sequence[Part], batch: Batch, trained: dict[str, Any], clock: StepClock
    ) -> None:
        loop, metrics = self.stages.loop, {}
        try:
            await self._publish(clock)
            if self._eval_due():
                trained |= await self._evaluate()
        finally:  # the batch is consumed, whatever comes after
            facts = self._facts(step, parts, batch, trained | dict(self.stages.channel.take_counts()), clock)
            metrics = self._record(facts)
            if metrics.get("tokens/batch_trained") == 0:
                why = f"its {len(batch.samples)} rollouts have none that is young enough"
                self._event("notice", reason=f"no token of step {step}'s batch was trained on, the weights stay: {why}")
            loop.meter.phase("generate")
        if self._checkpoint_every and self.version % self._checkpoint_every == 0:
            await self._save()
        if self.stages.chooser is not None and self.version < self.steps:
            processed = sum(len(sample.token_ids) for sample in batch.samples)
            await self.stages.chooser.after_step(metrics, facts.work, processed)

    def _facts(
        self, step: int, parts: Sequence[Part], batch: Batch, trained: Mapping[str, Any], clock: StepClock
    ) -> StepFacts:
        loop = self.stages.loop
        return StepFacts(
            step=step,
            batch=batch,
            freshness=loop.policy.freshness,
            censors=loop.policy.censors,
            groups=[group for part in parts for group in part.groups],
            dropped=loop.take_dropped(),
            work=loop.meter.read(),
            generated=dict(loop.meter.generated),
            trainer=trained,
            seconds=clock.seconds(),
            decisions=loop.decisions,
            rates=self.stages.rates,
            streamed=sum(len(part.groups) for part in parts if not part.closed),
        )

    async def _publish(self, clock: StepClock) -> None:
        """New weights to every engine that serves, while they are paused; then the scheduler goes on."""
        loop, version = self.stages.loop, self.stages.trainer.version
        self._event("publish_begin", version=version)
        if loop.pool.colocated:
            await self._hand_over()
            clock.book("switch")
        loop.meter.phase("sync")
        lazily = loop.policy.placing.own_version
        try:
            if not lazily:
                await self._publisher.to_serving(version)
        finally:  # the optimizer step has happened: a checkpoint must count the batch as consumed
            clock.book("publish")
            loop.published(version, () if lazily else None, kv_kept=lazily or self.stages.kv_kept)
            loop.meter.phase("generate")
        self._event("publish_end", version=version)

    def _record(self, facts: StepFacts) -> dict[str, Any]:
        loop = self.stages.loop
        self._lengths.add(facts.groups, facts.dropped)
        if self.stages.record_rollouts:
            self.stages.recorder.rollouts(
                facts.step, rollout_rows(facts.batch, facts.groups, facts.dropped, self.stages.decode)
            )
        metrics = step_metrics(facts, loop.pool, self._lengths)
        self.stages.recorder.step(facts.step, metrics)
        if self.stages.rates is None and not loop.settings.lockstep:  # where no decision may depend on the clock
            loop.pool.rates = self._lengths.rates(facts.work)
        return metrics

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def _eval_due(self) -> bool:
        return self.version == self.steps or bool(self._eval_every and self.version % self._eval_every == 0)

    async def _evaluate(self) -> dict[str, Any]:
        """Held-out accuracy of the published weights; empty without an evaluator or when this version has been done."""
        if self.stages.evaluator is None or self._evaluated_at == self.version:
            return {}
        if not self.stages.loop.pool.colocated:
            await self.stages.loop.park_all()
        begin, meter = now(), self.stages.loop.meter
        meter.phase("sync")  # until the engines that answer have the newest weights
        try:
            result = await self._unless_stopped(self._ask_evaluator(self.stages.evaluator))
        finally:
            meter.phase("generate")
        self._evaluated_at = self.version
        self._event("eval", **asdict(result))
        return {
            **({} if result.accuracy is None else {"eval/reward/mean": result.accuracy}),
            "eval/failed": result.failed,
            "eval/tokens/mean": result.mean_tokens,
            "time/eval_s": now() - begin,
        }

    async def _ask_evaluator(self, evaluator: Evaluator) -> EvalResult:
        """Asked again when all its engines died and some came back."""
        while True:
            engines = await self._up_to_date()
            self.stages.loop.meter.phase("eval")
            try:
                return await evaluator.run(self.version, engines)
            except RunError:
                if self._publisher.serving():
                    raise
                await self._publisher.settled()
                if not self._publisher.serving():
                    raise

    async def _up_to_date(self) -> list[Engine]:
        """Engines that serve the newest weights; where none does (each rollout keeps its version), one takes them."""
        loop, seating = self.stages.loop, self.stages.loop.pool.seating
        await loop.carrier.updates_done()
        if found := [engine for engine in self._publisher.serving() if seating[engine.name].version == self.version]:
            return found
        one = self._publisher.serving()[-1:]
        await self._publisher.update([engine.name for engine in one])
        return one

    # -- state --------------------------------------------------------------------------------------------------------

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's state; the trainer has loaded its own part."""
        loop = self.stages.loop
        loop.load_state(state["scheduler"])
        self._lengths = LengthLedger.from_state(state["lengths"])
        if self.stages.chooser is not None and state["chooser"] is not None:
            self.stages.chooser.load_state(state["chooser"])
        self._evaluated_at = state["evaluated_at"]
        if self.stages.trainer.version != self.version:
            raise RunError(f"the trainer is at version {self.stages.trainer.version}, the scheduler at {self.version}")
        await self._publisher.to_serving(self.version)

    async def _save(self, *, wait_for_scores: bool = True) -> None:
        """Parks what runs and writes a checkpoint of the last whole step."""
        await self.stages.loop.park_all(wait_for_scores=wait_for_scores)
        self._record_dropped()
        if self.stages.checkpoints is None:
            return
        state = {
            "scheduler": self.stages.loop.state(),
            "lengths": self._lengths.state(),
            "chooser": self.stages.chooser.state() if self.stages.chooser else None,
            "evaluated_at": self._evaluated_at,
            "record": self.stages.offsets() if self.stages.offsets else None,
        }
        await self.stages.checkpoints.save(self.version, self.stages.trainer, state)

    def _record_dropped(self) -> None:
        """Groups given up since the last step's record: whoever looks for the reason of an end finds them."""
        dropped = self.stages.loop.take_dropped()
        self._lengths.add((), dropped)
        if dropped and self.stages.record_rollouts:
            self.stages.recorder.rollouts(self.version + 1, rollout_rows(None, (), dropped, self.stages.decode))

    async def _save_if_possible(self) -> None:
        """After a failure: the engines may be gone, the reason of the failure must not be hidden by another."""
        try:
            await self._save(wait_for_scores=False)
        except Exception as error:
            self._event("error", reason=f"no checkpoint after the failure: {error}")

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; raises `Interrupted` instead as soon as the run is asked to end."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise Interrupted
            return task.result()
        finally:
            stop.cancel()
            task.cancel()

    def _event(self, kind: str, **fields: Any) -> None:
        self.stages.recorder.event(kind, now() - self.stages.loop.started_at, **fields)
