"""A whole run on virtual time, drawn as one value (policy, fleet, lengths, tools, faults, kills).

It is driven as the controller drives it. What it is held to is in `held`.
"""

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass

from scheduler.fleet import SlowReward, Source, Spy, Tools
from scheduler.held import CountingRecorder, Lineage, check_end, check_part

from gruppetto.clock import now, run_virtual
from gruppetto.engines.base import Sampling
from gruppetto.errors import EngineError
from gruppetto.rng import stream
from gruppetto.scheduler.loop import RolloutLoop
from gruppetto.scheduler.policies.composed import Composed
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.scheduler.policies.rounds import Continuous
from gruppetto.scheduler.settings import LoopSettings

SYNC = Composed("sync")


def partial(depth, freshness=None, max_parked_steps=None, **choices):
    """More groups than a batch, the rest parked."""
    return Composed(
        "partial",
        rounds=Continuous(depth),
        freshness=freshness or Freshness(),
        max_parked_steps=max_parked_steps,
        **choices,
    )


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
    """Engine number `engine` is dead, mute (it answers neither requests nor aborts any more), slow (tenfold) or
    slowish (fivefold) from `at_s` on."""

    engine: int
    at_s: float
    kind: str = "dead"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    policy: object = SYNC
    then: tuple[tuple[int, object], ...] = ()
    """(weights version, policy): followed from there on, by the running loop or one that takes up its snapshot."""
    colocated: bool = True
    batch_groups: int = 4
    group_size: int = 4
    engines: int = 1
    slots: int = 16
    engine_queue: int = 0
    row_s: float = 0.0
    tight_kv: bool = False
    """An engine's KV holds one context of the longest kind, and prefill takes time."""
    sigma: float = 1.0
    alike: float = 0.0
    """Share of the log-length's deviation that the members of a group have in common."""
    max_tokens: int = 200
    context: int = 1000
    prompts: tuple[int, ...] = (8,)
    tasks: int = 1 << 30
    """Different tasks; after so many they come again."""
    turns: int = 0
    """Most turns of a rollout; 0 = there is no environment."""
    tool_s: float = 5.0
    tool_fails: float = 0.0
    reward_s: float = 0.0
    reward_fails: float = 0.0
    same_reward: float = 0.0
    drop_zero_variance: bool = False
    when_starved_train: bool = False
    timeout_s: float = 5000.0
    abort_s: tuple[float, float] = (0.0, 0.0)
    """Seconds until an engine acts on an abort, and from then until it says so."""
    train_s: float = 0.0
    publish_s: float = 0.0
    kv_kept: bool = False
    faults: tuple[Fault, ...] = ()
    kills: tuple[Kill, ...] = ()
    give_back: frozenset[int] = frozenset()
    save_every: int = 1
    limit: int | None = None
    steps: int = 8
    seed: int = 0
    checked: bool = True
    """Every batch is held to the bound; off where a test breaks the rule on purpose."""
    laid_out: bool = True
    """Batches are laid out token by token and checked so."""

    def policy_at(self, version):
        """What is followed under this version of the weights."""
        return [self.policy, *(policy for at, policy in self.then if at <= version)][-1]

    @property
    def policies(self):
        """All that are followed at some time."""
        return [self.policy, *(policy for _, policy in self.then)]

    def draw(self, *names):
        return stream(self.seed, *names)

    def length(self, rollout, task):
        """Model tokens the rollout would make if nothing stopped it."""
        z = self.draw("length", rollout).gauss(0, 1)
        if self.alike:
            z = self.alike**0.5 * self.draw("task", task % self.tasks).gauss(0, 1) + (1 - self.alike) ** 0.5 * z
        return max(1, int(20 * 2.718281828 ** (self.sigma * z)))

    def prompt(self, task):
        return self.prompts[task % len(self.prompts)]

    def ends(self, rollout, task):
        """Model tokens, counted from the start, at which its turns end."""
        length = self.length(rollout, task)
        if self.turns < 2:
            return [length]
        draw = self.draw("turns", rollout)
        cuts = {draw.randint(1, length) for _ in range(draw.randint(0, self.turns - 1))}
        return sorted({*cuts, length})

    def observation(self, rollout, turn):
        """Tokens that the tool answers after so many turns."""
        return self.draw("observation", rollout, turn).choice((0, 3, 30))

    def expected_tokens(self, entry):
        """Model tokens of the whole rollout: what it wants, or what its budget or the context lets it have."""
        task, made, others = entry.group.task.extra["n"], 0, 0
        for turn, end in enumerate(self.ends(entry.id, task)):
            room = min(self.max_tokens - made, self.context - self.prompt(task) - others - made)
            if end - made > room:
                return made + max(0, room)
            made = end
            if self.turns:
                others += self.observation(entry.id, turn + 1)
        return made

    def settings(self):
        return LoopSettings(
            batch_groups=self.batch_groups,
            group_size=self.group_size,
            max_tokens=self.max_tokens,
            context=self.context,
            sampling=Sampling(max_tokens=1),
            colocated=self.colocated,
            timeout_s=self.timeout_s,
            tool_timeout_s=40.0,
            abort_s=10.0,
            stall_s=2 * self.timeout_s + 1000,
            engine_queue=self.engine_queue,
            drop_zero_variance=self.drop_zero_variance,
            max_filtered_groups=24,
            when_starved_train=self.when_starved_train,
        )


class Run:
    """Drives one scenario."""

    def __init__(self, scenario):
        self.scenario = scenario
        self.lineage = Lineage()
        self.recorder = CountingRecorder()
        self.kills = {kill.step: kill for kill in scenario.kills}
        self.give_back = set(scenario.give_back)
        self.weights = asyncio.Lock()
        self.version = 0
        """Of the trainer."""

    async def go(self):
        """Runs to the end; what it raises is the run's own end. The loop is left open."""
        async with asyncio.timeout(1e7):
            await self.fresh_loop(None)
            while self.loop.pool.version < self.scenario.steps and await self._step():
                pass

    async def fresh_loop(self, state):
        scenario, live = self.scenario, set()
        self.fleet = [Spy(f"e{i}", scenario, live, self) for i in range(scenario.engines)]
        self.recorder.loop = None
        self.loop = RolloutLoop(
            scenario.settings(),
            scenario.policy_at(0 if state is None else json.loads(state)["pool"]["version"]),
            self.fleet,
            SlowReward(scenario),
            Source(scenario),
            self.recorder,
            Tools(scenario) if scenario.turns else None,
        )
        self.loop.updater = self._update
        self.weights, self.version, self.publishing = asyncio.Lock(), 0, False
        if state is not None:
            self.loop.load_state(json.loads(state))
            self.loop.carrier.tell_left_over()
            self.version = self.loop.pool.version
            await self._publish_to(self.fleet, "abort")
        self.recorder.loop = self.loop
        self.saved, self.saved_lineage = state or json.dumps(self.loop.state()), self.lineage.copy()
        for fault in self.scenario.faults:
            engine = self.fleet[fault.engine % scenario.engines]
            asyncio.get_running_loop().call_later(max(0.0, fault.at_s - now()), engine.fail, fault.kind)

    # -- a step -------------------------------------------------------------------------------------------------------

    async def _step(self):
        kill = self.kills.pop(self.loop.pool.version, None)
        if kill is None:
            return await self._train()
        task = asyncio.create_task(self._train())
        done, _ = await asyncio.wait({task}, timeout=kill.after_s)
        if done or (self.publishing and kill.how != "kill"):
            return await task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if kill.how == "kill":
            state, self.lineage = self.saved, self.saved_lineage.copy()
            await self.loop.close()
            await self.fresh_loop(state)
            return True
        await self.save(wait_for_scores=kill.how == "pause")
        if kill.how == "interrupt":
            await self.loop.close()
            await self.fresh_loop(self.saved)
        return True

    async def _train(self):
        """One batch, part by part; False when the data has ended."""
        loop, scenario, version = self.loop, self.scenario, self.loop.pool.version
        parts = []
        try:
            while not (parts and parts[-1].closed):
                part = await loop.next_part()
                if part is None:
                    assert not parts
                    return False
                parts.append(part)
                await asyncio.sleep(scenario.train_s / 2)
        except asyncio.CancelledError:
            loop.give_back([group for part in parts for group in part.groups])
            raise
        assert loop.pool.version == version
        groups = [group for part in parts for group in part.groups]
        if version in self.give_back:
            self.give_back.discard(version)
            loop.give_back(groups)
            return True
        if scenario.checked:
            check_part(scenario, groups, version)
        await self._publish(version + 1)
        self.lineage.batches.append(groups)
        if (policy := scenario.policy_at(version + 1)) is not loop.policy:
            loop.follow(policy)
        if self.loop.pool.version % scenario.save_every == 0:
            await self.save()
        return True

    async def save(self, *, wait_for_scores=True):
        await self.loop.park_all(wait_for_scores=wait_for_scores)
        self.lineage.dropped += self.loop.take_dropped()
        self.saved, self.saved_lineage = json.dumps(self.loop.state()), self.lineage.copy()

    # -- weights ------------------------------------------------------------------------------------------------------

    async def _publish(self, version):
        own = self.loop.policy.placing.own_version
        self.publishing = True
        async with self.weights:
            self.version = version
        if not own:
            serving = [engine for engine in self.fleet if engine.name in self.loop.pool.serving]
            await self._publish_to(serving, "abort" if self.scenario.colocated else "keep")
        self.loop.published(version, () if own else None, kv_kept=own or self.scenario.kv_kept)
        self.publishing = False

    async def _update(self, names):
        async with self.weights:
            serving = [e for e in self.fleet if e.name in self.loop.pool.serving and e.name in names]
            await self._publish_to(serving, "abort")

    async def _publish_to(self, engines, mode):
        """All are paused before any has new weights, and all have them before any goes on, as in a real run."""
        await asyncio.sleep(self.scenario.publish_s)
        paused = [engine for engine in engines if await self._answers(engine, engine.pause(mode))]
        renewed = [engine for engine in paused if await self._answers(engine, self._renew(engine))]
        for engine in renewed:
            if await self._answers(engine, engine.resume()):
                self.loop.pool.seating[engine.name].version = self.version

    async def _renew(self, engine):
        await engine.begin_update(self.version)
        await engine.commit_update(self.version, 0)

    async def _answers(self, engine, call):
        """False where it does not, and is out."""
        try:
            async with asyncio.timeout(20):
                await call
        except (EngineError, TimeoutError) as error:
            self.loop.engine_lost(engine.name, str(error))
            return False
        return True


def run_scenario(scenario, kind=Run):
    """The finished run, and what ended it early (None when it reached its end)."""
    run = kind(scenario)

    async def main():
        try:
            await run.go()
        except Exception as error:
            return error
        finally:
            with suppress(AttributeError):
                await run.loop.close()
        return None

    error = run_virtual(main())
    if isinstance(error, AssertionError):
        raise error
    check_end(run)
    return run, error
