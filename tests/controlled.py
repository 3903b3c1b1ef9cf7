"""A controller over simulated stages on virtual time, and a record that keeps what it is told."""

from gruppetto.checkpoint import Checkpoints
from gruppetto.controller import Controller, Stages
from gruppetto.data.base import TaskSource
from gruppetto.engines.base import Sampling
from gruppetto.evaluation import Evaluator
from gruppetto.record.base import NullRecorder
from gruppetto.rng import stream
from gruppetto.scheduler.loop import RolloutLoop
from gruppetto.scheduler.policies.composed import Composed
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.scheduler.policies.placing import Placing
from gruppetto.scheduler.policies.rounds import Continuous
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.sim.engine import SimEngine
from gruppetto.sim.stages import SimChannel, SimReward, SimTrainer
from gruppetto.trainer.advantages import group_advantages
from gruppetto.types import Score, Task

STREAMED = Composed("streamed", rounds=Continuous(2.0), freshness=Freshness(1, "wait"), stream=True)
WINDOWED = Composed(
    "windowed", rounds=Continuous(2.0), freshness=Freshness(1, "wait"), placing=Placing(own_version=True)
)
PARTIAL = Composed("partial", rounds=Continuous(1.5), freshness=Freshness())


class SimSource(TaskSource):
    """Endless tasks (or `limit` of them) with prompts of one length."""

    def __init__(self, prompt_tokens=8, limit=None):
        self._prompt, self._limit, self._next = range(prompt_tokens), limit, 0

    def take(self, count):
        end = self._next + count if self._limit is None else min(self._next + count, self._limit)
        tasks = [Task(id=f"sim:{i}", prompt_ids=self._prompt) for i in range(self._next, end)]
        self._next = end
        return tasks

    def state(self):
        return {"next": self._next}

    def load_state(self, state):
        self._next = int(state["next"])


class Record(NullRecorder):
    """Keeps what it is told."""

    def __init__(self):
        self.events, self.steps, self.rows = [], [], []

    def event(self, kind, t, **fields):
        self.events.append({"kind": kind, "t": t, **fields})

    def step(self, step, metrics):
        self.steps.append(metrics)

    def rollouts(self, step, rows):
        self.rows += [{"step": step, **row} for row in rows]


class Run:
    """A controller with everything it needs; `engines` of 8 slots, batches of 3 groups of 3."""

    def __init__(
        self, tmp_path, *, engines=2, score_s=0.0, score_of=None, trainer=None, policy=None, eval_every=0, **settings
    ):
        defaults = {"batch_groups": 3, "group_size": 3, "max_tokens": 60, "context": 200, "seed": 1}
        self.settings = LoopSettings(**(defaults | {"sampling": Sampling(max_tokens=1)} | settings))
        self.engines = [SimEngine(f"e{i}", slots=8, length_of=length_of) for i in range(engines)]
        self.reward = SimReward(score_of or (lambda r: Score(reward=float(r.member))), score_s)
        self.record, self.trainer = Record(), trainer or SimTrainer(step_s=5.0)
        source = SimSource()
        self.loop = RolloutLoop(self.settings, policy or PARTIAL, self.engines, self.reward, source, self.record)
        held_out = [Task(id=f"held:{i}", prompt_ids=range(4)) for i in range(6)]
        self.checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
        stages = Stages(
            engines=self.engines,
            reward=self.reward,
            trainer=self.trainer,
            channel=SimChannel(1.0),
            recorder=self.record,
            loop=self.loop,
            advantages=lambda rewards: group_advantages(rewards, normalize=True),
            checkpoints=self.checkpoints,
            evaluator=Evaluator(held_out, self.settings, 1.0, self.reward),
        )
        self.controller = Controller(stages, steps=6, eval_every=eval_every)

    def saved(self):
        return self.checkpoints.read_state(self.checkpoints.complete()[0])

    def kinds(self, kind):
        return [event for event in self.record.events if event["kind"] == kind]


def length_of(request):
    return 3 + int(stream(0, request.rid).expovariate(0.1))
