"""A whole run on virtual time, drawn as one value (policy, fleet, lengths, faults, kills), and what it is held to."""

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from gruppetto.buffer.batch import build_batch
from gruppetto.clock import now, run_virtual
from gruppetto.engines.base import Sampling
from gruppetto.record.base import NullRecorder
from gruppetto.rng import stream
from gruppetto.scheduler.loop import RolloutLoop
from gruppetto.scheduler.policies.sync import Sync
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.sim.engine import SimEngine
from gruppetto.sim.stages import SimReward, SimSource
from gruppetto.trainer.advantages import group_advantages
from gruppetto.types import Score, Task, TokenKind, TokenUse

ADVANTAGES = partial(group_advantages, normalize=True)


@dataclass(frozen=True)
class Kill:
    """In the middle of a step, `after_s` seconds into it.

    `how` is kill (all is thrown away and the last snapshot taken up), interrupt (everything is parked, saved and taken
    up by a fresh loop) or pause (parked and saved, and the loop goes on).
    """

    step: int
    after_s: float
    how: str


@dataclass(frozen=True)
class Fault:
    """Engine number `engine` dies at `at_s`, or goes mute: it answers neither requests nor aborts any more."""

    engine: int
    at_s: float
    mute: bool


@dataclass(frozen=True, kw_only=True)
class Scenario:
    policy: object = field(default_factory=Sync)
    batch_groups: int = 4
    group_size: int = 4
    engines: int = 1
    slots: int = 16
    engine_queue: int = 0
    row_s: float = 0.0
    sigma: float = 1.0
    max_tokens: int = 200
    context: int = 1000
    prompts: tuple[int, ...] = (8,)
    reward_s: float = 0.0
    reward_fails: float = 0.0
    same_reward: float = 0.0
    drop_zero_variance: bool = False
    when_starved_train: bool = False
    timeout_s: float = 5000.0
    abort_s: tuple[float, float] = (0.0, 0.0)
    """Seconds until an engine acts on an abort, and from then until it says so."""
    train_s: float = 0.0
    faults: tuple[Fault, ...] = ()
    kills: tuple[Kill, ...] = ()
    give_back: frozenset[int] = frozenset()
    limit: int | None = None
    steps: int = 8
    seed: int = 0
    checked: bool = True
    """Every batch is held to the bound; off where a test breaks the rule on purpose."""

    def draw(self, *names):
        return stream(self.seed, *names)

    def length(self, rollout):
        """Tokens the rollout would make if nothing stopped it."""
        return max(1, int(self.draw("length", rollout).lognormvariate(3, self.sigma)))

    def prompt(self, task):
        return self.prompts[task % len(self.prompts)]

    def expected_tokens(self, entry):
        room = self.context - self.prompt(entry.group_id)
        return max(0, min(self.length(entry.id), self.max_tokens, room))

    def settings(self):
        return LoopSettings(
            batch_groups=self.batch_groups,
            group_size=self.group_size,
            max_tokens=self.max_tokens,
            context=self.context,
            sampling=Sampling(max_tokens=1),
            timeout_s=self.timeout_s,
            abort_s=10.0,
            stall_s=2 * self.timeout_s + 1000,
            engine_queue=self.engine_queue,
            drop_zero_variance=self.drop_zero_variance,
            max_filtered_groups=24,
            when_starved_train=self.when_starved_train,
        )


class Source(SimSource):
    """Tasks whose prompts differ in length."""

    def __init__(self, scenario):
        super().__init__(limit=scenario.limit)
        self._scenario = scenario

    def take(self, count):
        tasks = super().take(count)
        return [Task(id=t.id, prompt_ids=range(self._scenario.prompt(int(t.id[4:])))) for t in tasks]


class SlowReward(SimReward):
    """Random delays, some failures, some groups in which every reward is the same."""

    def __init__(self, scenario):
        self._scenario = scenario
        self.scored = Counter()

    async def score(self, rollout):
        draw = self._scenario.draw("reward", rollout.id)
        await asyncio.sleep(draw.expovariate(1) * self._scenario.reward_s)
        if draw.random() < self._scenario.reward_fails:
            return Score(reward=None, error="timeout")
        same = self._scenario.draw("same", rollout.group_id).random() < self._scenario.same_reward
        return Score(reward=1.0 if same else float(draw.random() < 0.5))


class SpyEngine(SimEngine):
    """A simulated engine that checks every request, may die, and may go mute."""

    def __init__(self, name, scenario, live):
        super().__init__(
            name,
            slots=scenario.slots,
            length_of=lambda request: scenario.length(request.rid),
            row_s=scenario.row_s,
        )
        self._scenario, self._live = scenario, live
        self._speaks = asyncio.Event()
        self._speaks.set()

    async def generate(self, request):
        scenario, budget = self._scenario, request.sampling.max_tokens
        assert budget > 0
        assert request.made + budget <= scenario.max_tokens
        assert len(request.token_ids) + budget <= scenario.context
        assert request.rid not in self._live
        self._live.add(request.rid)
        try:
            result = await super().generate(request)
            await self._speaks.wait()
            return result
        finally:
            self._live.discard(request.rid)

    async def abort(self, rid=None):
        await self._speaks.wait()
        await asyncio.sleep(self._scenario.abort_s[0])
        stopped = await super().abort(rid)
        await asyncio.sleep(self._scenario.abort_s[1])
        return stopped

    async def pause(self, mode):
        self._speaks.set()
        await super().abort()
        await super().pause("keep")

    def fail(self, mute):
        if mute:
            self._speaks.clear()
        else:
            self.kill("power cut")


class CountingRecorder(NullRecorder):
    """Collects the events, and at each of them recounts what is live."""

    def __init__(self):
        self.events = []
        self.closed = asyncio.Event()
        self.loop = None

    def event(self, kind, t, **fields):
        self.events.append((kind, t, tuple(sorted(fields.items(), key=lambda item: item[0]))))
        if kind == "close":
            self.closed.set()
        if self.loop is not None:
            entries = self.loop.pool.rollouts.values()
            assert self.loop.pool.census.balanced(len(entries), sum(r.tokens for r in entries))


@dataclass
class Lineage:
    """What has become final in the history that counts: a kill throws away what came after the last snapshot."""

    batches: list = field(default_factory=list)
    dropped: list = field(default_factory=list)

    def copy(self):
        return Lineage(list(self.batches), list(self.dropped))


class Run:
    """Drives one scenario as the controller does."""

    def __init__(self, scenario):
        self.scenario = scenario
        self.lineage = Lineage()
        self.recorder = CountingRecorder()
        self.kills = {kill.step: kill for kill in scenario.kills}
        self.give_back = set(scenario.give_back)
        self.faults = list(scenario.faults)

    async def go(self):
        """Runs to the end; what it raises is the run's own end. The loop is left open."""
        async with asyncio.timeout(1e7):
            await self._fresh_loop(None)
            while self.loop.pool.version < self.scenario.steps and await self._step():
                pass

    async def _fresh_loop(self, state):
        scenario, live = self.scenario, set()
        self.fleet = [SpyEngine(f"e{i}", scenario, live) for i in range(scenario.engines)]
        self.recorder.loop = None
        self.loop = RolloutLoop(
            scenario.settings(), scenario.policy, self.fleet, SlowReward(scenario), Source(scenario), self.recorder
        )
        if state is not None:
            self.loop.load_state(json.loads(state))
            await self._publish(self.loop.pool.version)
        self.recorder.loop = self.loop
        self.saved, self.saved_lineage = json.dumps(self.loop.state()), self.lineage.copy()
        for fault in self.faults:
            engine = self.fleet[fault.engine % scenario.engines]
            asyncio.get_running_loop().call_later(max(0.0, fault.at_s - now()), engine.fail, fault.mute)

    async def _step(self):
        pool, scenario = self.loop.pool, self.scenario
        kill = self.kills.pop(pool.version, None)
        if kill is not None and await self._struck(kill):
            return True
        batch = await self.loop.next_batch()
        if not batch:
            return False
        await asyncio.sleep(scenario.train_s)
        if pool.version in self.give_back:
            self.give_back.discard(pool.version)
            self.loop.give_back(batch)
            return True
        if scenario.checked:
            self._check(batch, pool.version)
        await self._publish(pool.version + 1)
        self.loop.published(pool.version + 1)
        self.lineage.batches.append(batch)
        await self._save()
        return True

    async def _struck(self, kill):
        """Stops the step in its middle; False where it was done before that."""
        task = asyncio.create_task(self.loop.next_batch())
        done, _ = await asyncio.wait({task}, timeout=kill.after_s)
        if done:
            if task.exception() is not None:
                raise task.exception()
            if task.result():
                self.loop.give_back(task.result())
            return False
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if kill.how == "kill":
            state, self.lineage = self.saved, self.saved_lineage.copy()
            await self.loop.close()
            await self._fresh_loop(state)
            return True
        await self._save()
        if kill.how == "interrupt":
            await self.loop.close()
            await self._fresh_loop(self.saved)
        return True

    async def _save(self):
        await self.loop.park_all()
        self.lineage.dropped += self.loop.take_dropped()
        self.saved, self.saved_lineage = json.dumps(self.loop.state()), self.lineage.copy()

    async def _publish(self, version):
        for engine in self.fleet:
            if engine.name in self.loop.pool.serving and engine._dead is None:
                await engine.pause("abort")
                await engine.begin_update(version)
                await engine.commit_update(version, 0)
                await engine.resume()

    # -- what holds for every batch -----------------------------------------------------------------------------------

    def _check(self, groups, version):
        freshness = self.scenario.policy.freshness
        batch = build_batch(groups, version, freshness, ADVANTAGES)
        usable = {m.id: m for group in groups for m in group.usable()}
        assert len(groups) <= self.scenario.batch_groups
        assert [s.rollout_id for s in batch.samples] == list(usable)
        for sample in batch.samples:
            self._check_sample(sample, version, freshness)
        for group in groups:
            self._check_group(group, [s for s in batch.samples if s.group_id == group.id])

    def _check_sample(self, sample, version, freshness):
        for made, kind, use in zip(sample.versions, sample.kinds, sample.use, strict=True):
            staleness = version - made
            if kind == TokenKind.PROMPT:
                assert use == TokenUse.PROMPT
                continue
            assert staleness >= 0
            bound = freshness.max_staleness
            if bound is None or staleness <= bound:
                assert use == TokenUse.TRAINED
            else:
                assert (use, freshness.over_age) == (TokenUse.STALE, "mask")
        oldest = getattr(self.scenario.policy, "max_parked_steps", None)
        if oldest is not None:
            assert all(version - v <= oldest for v in sample.versions if v >= 0)

    def _check_group(self, group, samples):
        rewards = [s.reward for s in samples]
        mean = sum(rewards) / len(rewards)
        assert len(samples) >= 2
        assert abs(sum(s.advantage for s in samples)) < 1e-6
        assert all((s.advantage > 0) == (s.reward > mean) for s in samples)
        for member in group.members:
            assert (member.failure is None) == (member.score is not None)
            if member.score is not None:
                assert member.tokens == self.scenario.expected_tokens(member)
                versions = [s.version for s in member.segments]
                assert versions == sorted(versions)

    def check_end(self):
        """Exactly once: every group that was ever launched is trained, dropped or live, and only one of them."""
        trained = [g.id for batch in self.lineage.batches for g in batch]
        dropped = [g.id for g, _ in self.lineage.dropped] + [g.id for g, _ in self.loop.take_dropped()]
        live = list(self.loop.pool.groups)
        assert sorted(trained + dropped + live) == list(range(self.loop.pool.next_group_id))
        for batch in self.lineage.batches:
            assert all(g.task.id == f"sim:{g.id}" for g in batch)


def run_scenario(scenario):
    """The finished run, and what ended it early (None when it reached its end)."""
    run = Run(scenario)

    async def main():
        try:
            await run.go()
        except Exception as error:
            return error
        finally:
            await run.loop.close()
        return None

    error = run_virtual(main())
    return run, error
