"""Stages that do as they are told, and the calls to them."""

import asyncio
from dataclasses import dataclass, field

from gruppetto.agents.base import Environment, Observation
from gruppetto.engines.base import EngineFinish, GenerateResult, Sampling
from gruppetto.rewards.base import Reward
from gruppetto.scheduler.calls import RolloutCalls
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.types import FinishReason, Score, Segment, Task, TokenKind

SAMPLING = Sampling(max_tokens=1, temperature=0.5, top_p=0.9, top_k=5, stop_ids=(3,), stop=("x",))
TASK = Task(id="t", prompt_ids=range(8))


def model(count, version=0):
    return Segment(TokenKind.MODEL, version, range(count), [0.0] * count)


def answer(rid, count, finish=EngineFinish.STOP):
    return GenerateResult(rid=rid, segments=(model(count),) if count else (), finish=finish)


@dataclass
class Entry:
    """As much of a rollout as a call looks at."""

    id: str
    segments: list = field(default_factory=list)
    finish: FinishReason | None = None
    seed: int | None = None

    @property
    def group_id(self):
        return int(self.id[1:].split(".")[0])

    @property
    def member(self):
        return int(self.id.split(".")[1])

    @property
    def context(self):
        return len(TASK.prompt_ids) + sum(map(len, self.segments))

    @property
    def tokens(self):
        return sum(len(s) for s in self.segments if s.kind is TokenKind.MODEL)


class Scripted:
    """An engine whose calls wait `takes[rid]` seconds (default 1), and whose aborts can be deaf."""

    def __init__(self, name="e0", takes=None, deaf=False, made=4):
        self.name, self.takes, self.deaf, self.made = name, takes or {}, deaf, made
        self.live, self.requests, self.asked = {}, [], []

    async def generate(self, request):
        self.requests.append(request)
        stopped = self.live[request.rid] = asyncio.Event()
        try:
            async with asyncio.timeout(self.takes.get(request.rid, 1.0)):
                await stopped.wait()
        except TimeoutError:
            return answer(request.rid, self.made)
        else:
            return answer(request.rid, 2, EngineFinish.ABORT)
        finally:
            del self.live[request.rid]

    async def abort(self, rid=None):
        self.asked.append(rid)
        if self.deaf:
            await asyncio.Event().wait()
        for stopped in [self.live[rid]] if rid in self.live else list(self.live.values()) if rid is None else []:
            stopped.set()
        return 0


class Raising(Scripted):
    def __init__(self, error):
        super().__init__()
        self.error = error

    async def generate(self, request):
        raise self.error


class Giving(Scripted):
    """Answers at once with what it is given."""

    def __init__(self, result):
        super().__init__()
        self.result = result

    async def generate(self, request):
        return self.result


class Direct(Scripted):
    """Its calls are futures."""

    def submit(self, request):
        self.requests.append(request)
        future = self.live[request.rid] = asyncio.get_running_loop().create_future()
        return future

    async def abort(self, rid=None):
        self.asked.append(rid)
        return 0

    def answer(self, rid, count=4):
        self.live.pop(rid).set_result(answer(rid, count))


class Judge(Reward):
    name = "judge"

    def __init__(self, act=lambda rollout: Score(reward=1.0), seconds=0.0):
        self.act, self.seconds = act, seconds

    async def score(self, rollout):
        await asyncio.sleep(self.seconds)
        return self.act(rollout)


class Tool(Environment):
    def __init__(self, act=lambda rollout: Observation((), False, 0.5), seconds=0.5):
        self.act, self.seconds = act, seconds
        self.seen = []

    async def step(self, rollout):
        self.seen.append(rollout)
        await asyncio.sleep(self.seconds)
        return self.act(rollout)


def make(*engines, reward=None, environment=None, **changes):
    defaults = {"batch_groups": 1, "group_size": 4, "max_tokens": 100, "context": 1000}
    settings = LoopSettings(sampling=SAMPLING, **(defaults | changes))
    return RolloutCalls(settings, {e.name: e for e in engines}, reward or Judge(), environment)


async def drain(calls):
    """All events, until nothing is out; none comes twice."""
    events = []
    while calls.outstanding:
        events += await calls.events()
    names = [(type(event), event.rollout) for event in events]
    assert len(names) == len(set(names))
    return {event.rollout: event for event in events}
