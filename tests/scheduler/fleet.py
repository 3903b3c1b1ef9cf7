"""The stages of a scenario: tasks, engines that check every request and break on demand, tools, rewards."""

import asyncio
from collections import Counter

from controlled import SimSource

from gruppetto.agents.base import Environment, Observation
from gruppetto.sim.engine import EngineModel, SimEngine
from gruppetto.sim.stages import SimReward
from gruppetto.types import NO_VERSION, Score, Segment, Task, TokenKind

SLOWER = {"slow": 10.0, "slowish": 5.0}
"""Times the pace of the others: one is taken out of the run, the other gets no new work."""


class Source(SimSource):
    """Tasks whose prompts differ in length; `extra["n"]` is the number of the take."""

    def __init__(self, scenario):
        super().__init__(limit=scenario.limit)
        self._scenario = scenario

    def take(self, count):
        numbers = [int(task.id[4:]) for task in super().take(count)]
        return [self._task(number) for number in numbers]

    def _task(self, number):
        prompt = range(self._scenario.prompt(number))
        return Task(id=f"sim:{number % self._scenario.tasks}", prompt_ids=prompt, extra={"n": number})


class SlowReward(SimReward):
    """Random delays, some failures, some groups in which every reward is the same."""

    def __init__(self, scenario):
        self._scenario = scenario
        self.scored = Counter()

    async def score(self, rollout):
        self.scored[rollout.id] += 1
        draw = self._scenario.draw("reward", rollout.id)
        await asyncio.sleep(draw.expovariate(1) * self._scenario.reward_s)
        if draw.random() < self._scenario.reward_fails:
            return Score(reward=None, error="timeout")
        same = self._scenario.draw("same", rollout.group_id).random() < self._scenario.same_reward
        return Score(reward=1.0 if same else float(draw.random() < 0.5))


class Tools(Environment):
    """Answers after a while, with some tokens or none; some raise, some never answer."""

    def __init__(self, scenario):
        self._scenario = scenario

    async def step(self, rollout):
        scenario, made = self._scenario, rollout.model_tokens
        ends = scenario.ends(rollout.id, rollout.task.extra["n"])
        draw = scenario.draw("tool", rollout.id, made)
        if draw.random() < scenario.tool_fails:
            if draw.random() < 0.5:
                raise RuntimeError("the tool broke")
            await asyncio.Event().wait()
        if made >= ends[-1]:
            return Observation((), done=True, seconds=0.0)
        seconds = draw.choice((0.0, 0.5, 3.0)) * scenario.tool_s
        await asyncio.sleep(seconds)
        count = scenario.observation(rollout.id, ends.index(made) + 1)
        segment = Segment(TokenKind.ENVIRONMENT, NO_VERSION, range(count), [0.0] * count)
        return Observation((segment,) if count else (), done=False, seconds=seconds)


class Spy(SimEngine):
    """A simulated engine that checks every request, may die, go mute or become slow."""

    def __init__(self, name, scenario, live, run):
        self._scenario, self._live, self._run_of = scenario, live, run
        model = EngineModel(
            slots=scenario.slots,
            row_s=scenario.row_s,
            kv_capacity=scenario.context if scenario.tight_kv else 0,
            prefill_token_s=0.01 if scenario.tight_kv else 0.0,
        )
        super().__init__(
            name,
            length_of=self._next_end,
            model=model,
            context=scenario.context,
            kv_on_swap="keep" if scenario.kv_kept else "recompute",
        )

    def _next_end(self, request):
        entry = self._run_of.loop.pool.rollouts[request.rid]
        ends = self._scenario.ends(request.rid, entry.group.task.extra["n"])
        return next((end for end in ends if end > request.made), ends[-1])

    def submit(self, request):
        scenario, budget = self._scenario, request.sampling.max_tokens
        assert budget > 0
        assert request.made + budget <= scenario.max_tokens
        assert len(request.token_ids) + budget <= scenario.context
        assert request.rid not in self._live
        future = super().submit(request)
        self._live.add(request.rid)
        future.add_done_callback(lambda _: self._live.discard(request.rid))
        return future

    async def abort(self, rid=None):
        before, after = self._scenario.abort_s
        if before:
            await asyncio.sleep(before)
        stopped = await super().abort(rid)
        if after:
            await asyncio.sleep(after)
        return stopped

    def fail(self, kind):
        if kind == "mute":
            self.hang()
        elif kind in SLOWER:
            self.slow(SLOWER[kind])
        else:
            self.kill("power cut")
