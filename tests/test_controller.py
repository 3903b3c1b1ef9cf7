"""The controller over simulated stages on virtual time: what it does when a part fails at the worst moment."""

import asyncio
import contextlib
import json

import pytest

from gruppetto.checkpoint import Checkpoints
from gruppetto.clock import now, run_virtual
from gruppetto.controller import Controller, Interrupted, Stages
from gruppetto.engines.base import Sampling
from gruppetto.errors import RunError
from gruppetto.evaluation import Evaluator
from gruppetto.record.base import NullRecorder
from gruppetto.rng import stream
from gruppetto.scheduler.entries import GroupEntry, RolloutEntry
from gruppetto.scheduler.loop import RolloutLoop
from gruppetto.scheduler.policies.composed import Composed
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.scheduler.policies.placing import Placing
from gruppetto.scheduler.policies.rounds import Continuous
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.sim.engine import SimEngine
from gruppetto.sim.stages import SimChannel, SimReward, SimSource, SimTrainer
from gruppetto.trainer.advantages import group_advantages
from gruppetto.types import FinishReason, Score, Task, TokenKind

STREAMED = Composed("streamed", rounds=Continuous(2.0), freshness=Freshness(1, "wait"), stream=True)
WINDOWED = Composed(
    "windowed", rounds=Continuous(2.0), freshness=Freshness(1, "wait"), placing=Placing(own_version=True)
)
PARTIAL = Composed("partial", rounds=Continuous(1.5), freshness=Freshness())


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


def test_an_engine_that_dies_while_training_is_out_and_the_run_goes_on(tmp_path):
    class Killing(SimTrainer):
        async def optim_step(self):
            if self.version == 2:
                run.engines[0].kill("power cut")
            return await super().optim_step()

    async def main():
        nonlocal run
        run = Run(tmp_path, trainer=Killing(), eval_every=1)
        await run.controller.run()

    run = None
    run_virtual(main())
    assert [row["version"] for row in run.record.steps] == [1, 2, 3, 4, 5, 6]
    assert [event["engine"] for event in run.kinds("error")] == ["e0"]
    assert [event["version"] for event in run.kinds("eval")] == [0, 1, 2, 3, 4, 5, 6]
    assert all(event["failed"] == 0 for event in run.kinds("eval"))


def test_an_engine_that_dies_in_an_evaluation_loses_no_answer(tmp_path):
    async def main():
        run = Run(tmp_path)
        asyncio.get_running_loop().call_later(2.5, run.engines[0].kill, "power cut")
        await run.controller.run()
        return run

    run = run_virtual(main())
    assert run.kinds("eval")[0]["failed"] == 0
    assert len(run.record.steps) == 6


def test_without_an_engine_the_publish_ends_the_run_with_a_checkpoint(tmp_path):
    class Killing(SimTrainer):
        async def optim_step(self):
            if self.version == 2:
                run.engines[0].kill("power cut")
            return await super().optim_step()

    async def main():
        nonlocal run
        run = Run(tmp_path, engines=1, trainer=Killing())
        await run.controller.run()

    run = None
    with pytest.raises(RunError, match="no engine is left to take weights version 3"):
        run_virtual(main())
    assert run.checkpoints.complete()[0].name == "step_3"
    assert len(run.record.steps) == 3


@pytest.mark.parametrize("verb", ["forward_backward", "optim_step"])
def test_any_failure_of_the_trainer_gives_the_batch_back_and_saves(tmp_path, verb):
    class Failing(SimTrainer):
        async def forward_backward(self, samples, *, share=1.0):
            if verb == "forward_backward" and self.version == 2:
                raise RuntimeError("out of memory")

        async def optim_step(self):
            if verb == "optim_step" and self.version == 2:
                raise RuntimeError("out of memory")
            return await super().optim_step()

    async def main():
        nonlocal run
        run = Run(tmp_path, trainer=Failing())
        await run.controller.run()

    run = None
    with pytest.raises(RuntimeError, match="out of memory"):
        run_virtual(main())
    assert run.checkpoints.complete()[0].name == "step_2"
    assert run.saved()["scheduler"]["pool"]["census"]["trained"] == 2 * 9
    assert len(run.saved()["scheduler"]["pool"]["ready"]) >= 3


def test_an_interruption_does_not_wait_for_the_reward(tmp_path):
    async def main():
        run = Run(tmp_path, score_s=3600.0)
        run.controller.stages.evaluator = None
        loop = asyncio.get_running_loop()
        loop.call_later(50.0, run.controller.interrupt)
        with pytest.raises(Interrupted):
            await run.controller.run()
        return run, now()

    run, ended = run_virtual(main())
    assert ended < 52
    states = [m["state"] for g in run.saved()["scheduler"]["pool"]["groups"] for m in g["members"]]
    assert "finished" in states

    async def resumed():
        again = Run(tmp_path, score_s=1.0)
        await again.controller.restore(run.saved())
        await again.controller.run()
        return again

    again = run_virtual(resumed())
    assert len(again.record.steps) == 6
    assert again.loop.pool.census.dropped == {}


def test_scores_taken_back_before_they_began_are_not_open(tmp_path):
    async def main():
        run = Run(tmp_path, score_s=3600.0)
        task = Task(id="t", prompt_ids=range(4))
        entry = RolloutEntry("g0.0", GroupEntry(0, task, 1, 0), 0, finish=FinishReason.STOP)
        run.loop.calls.score(entry, task)
        await run.loop.calls.cancel_scores()  # in the same turn: the score's task has not begun
        return run.loop.calls.outstanding

    assert run_virtual(main()) == 0


def test_an_interrupted_evaluation_does_not_cost_the_step_its_record(tmp_path):
    async def main():
        run = Run(tmp_path, eval_every=1)
        original = run.controller.stages.evaluator.run

        async def slow(version, engines):
            if version == 2:
                run.controller.interrupt()
                await asyncio.sleep(1000)
            return await original(version, engines)

        run.controller.stages.evaluator.run = slow
        with pytest.raises(Interrupted):
            await run.controller.run()
        return run

    run = run_virtual(main())
    assert [row["version"] for row in run.record.steps] == [1, 2]
    assert run.checkpoints.complete()[0].name == "step_2"
    assert run.saved()["evaluated_at"] == 1


def test_groups_dropped_before_the_end_are_in_the_rollouts(tmp_path):
    async def main():
        nonlocal run
        run = Run(
            tmp_path,
            score_of=lambda r: Score(reward=None, error="raised KeyError: 'answer'"),
        )
        run.controller.stages.evaluator = None
        await run.controller.run()

    run = None
    with pytest.raises(RunError, match=r"groups in a row failed.*last reason: raised KeyError: 'answer'"):
        run_virtual(main())
    assert len(run.record.rows) >= 8 * 3
    assert [e["reason"] for e in run.kinds("notice")] == ["a rollout failed: raised KeyError: 'answer'"]
    assert {row["error"] for row in run.record.rows} == {"raised KeyError: 'answer'"}


def test_an_evaluation_in_which_nothing_was_scored_is_not_zero(tmp_path):
    async def main():
        run = Run(tmp_path, score_of=lambda r: Score(reward=None, error="verifier is down"))
        return await run.controller.stages.evaluator.run(0, run.engines)

    result = run_virtual(main())
    assert (result.accuracy, result.failed) == (None, 6)


def test_what_is_saved_is_json(tmp_path):
    async def main():
        run = Run(tmp_path)
        await run.controller.run()
        return run

    run = run_virtual(main())
    assert json.loads(json.dumps(run.saved())) == run.saved()


# -- engines that run while the trainer trains ------------------------------------------------------------------------


class Watching(SimTrainer):
    """Keeps the groups it was given, and what was dropped of them."""

    def __init__(self, step_s=5.0):
        super().__init__(step_s)
        self.parts, self.dropped, self.before_part = [], 0, lambda: None

    async def forward_backward(self, samples, *, share=1.0):
        self.before_part()
        self.parts.append((self.version, share, {s.group_id for s in samples}))
        await asyncio.sleep(1.0)

    async def drop_gradients(self):
        self.dropped += 1


def versions_of(run):
    """Of each trained rollout: (version it was trained at, versions of its tokens)."""
    found = {}

    def build_batch(groups, version, freshness, advantages):
        for group in groups:
            for m in group.usable():
                found[m.id] = (version, [s.version for s in m.segments if s.kind is TokenKind.MODEL], m.parks)
        return built(groups, version, freshness, advantages)

    built, run.controller.stages.build_batch = run.controller.stages.build_batch, build_batch
    return found


def go(tmp_path, prepare=lambda run: None, **choices):
    """A finished disaggregated run (or interrupted), the versions of what it trained on, and when it ended."""

    async def main():
        run = Run(tmp_path, colocated=False, **choices)
        found = versions_of(run)
        prepare(run)
        with contextlib.suppress(Interrupted):
            await run.controller.run()
        return run, found, now()

    return run_virtual(main())


def test_rollouts_go_on_while_the_trainer_works_and_keep_each_tokens_version_over_a_swap(tmp_path):
    run, found, _ = go(tmp_path, policy=PARTIAL, trainer=Watching(20.0))
    begins = [event["t"] for event in run.kinds("publish_begin")]
    stops = [event["t"] for event in run.kinds("stop")]
    assert all(any(begin - 20 < stop < begin for stop in stops) for begin in begins)
    assert any(len(versions) > 1 and not parks for _, versions, parks in found.values())
    assert all(versions == sorted(set(versions)) for _, versions, _ in found.values())
    assert run.loop.pool.census.dropped == {}
    assert len(run.record.steps) == 6


def test_the_trainer_has_the_parts_of_a_batch_while_its_tail_runs(tmp_path):
    trainer = Watching()
    _, found, _ = go(tmp_path, policy=STREAMED, trainer=trainer)
    by_step = [[ids for version, _, ids in trainer.parts if version == step] for step in range(6)]
    assert all(len(set().union(*parts)) == 3 for parts in by_step)
    assert max(map(len, by_step)) > 1
    trained = [group for _, _, ids in trainer.parts for group in ids]
    assert len(trained) == len(set(trained)) == 18
    assert all(version - min(versions) <= 1 for version, versions, _ in found.values())


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("at_part", [1, 2, 5, 8])
def test_an_interruption_in_a_streamed_step_gives_all_its_parts_back(tmp_path, at_part, colocated):
    trainer = Watching()

    def interrupt():
        if len(trainer.parts) == at_part - 1:
            run.controller.interrupt()

    async def main():
        nonlocal run
        run = Run(tmp_path, policy=STREAMED, trainer=trainer, colocated=colocated)
        run.controller.stages.evaluator = None
        trainer.before_part = interrupt
        with pytest.raises(Interrupted):
            await run.controller.run()

    run = None
    run_virtual(main())
    saved = run.saved()["scheduler"]["pool"]
    assert saved["census"]["trained"] == 9 * trainer.version
    assert trainer.dropped == 1
    last = set().union(*(ids for version, _, ids in trainer.parts if version == trainer.version))
    assert last
    assert last <= set(saved["ready"])

    async def resumed():
        again = Run(tmp_path, policy=STREAMED, trainer=Watching(), colocated=colocated)
        again.trainer.version = trainer.version
        await again.controller.restore(run.saved())
        await again.controller.run()
        return again

    again = run_virtual(resumed())
    assert len(again.record.steps) == 6 - trainer.version
    assert again.loop.pool.census.trained == 6 * 9
    assert again.loop.pool.census.dropped == {}


def test_an_evaluation_in_a_disaggregated_run_is_of_one_version_and_loses_no_rollout(tmp_path):
    run, found, _ = go(tmp_path, policy=STREAMED, eval_every=1)
    assert [event["version"] for event in run.kinds("eval")] == list(range(7))
    assert all(event["failed"] == 0 for event in run.kinds("eval"))
    assert any(parks for _, _, parks in found.values())
    assert run.loop.pool.census.dropped == {}


def test_engines_go_over_one_by_one_where_rollouts_keep_their_version(tmp_path):
    run, found, _ = go(tmp_path, policy=WINDOWED, engines=3)
    assert {len(set(versions)) for _, versions, _ in found.values()} == {1}
    assert {version - versions[0] for version, versions, _ in found.values()} == {0, 1}
    assert len(run.record.steps) == 6


@pytest.mark.parametrize("policy", [PARTIAL, STREAMED, WINDOWED], ids=lambda policy: policy.name)
@pytest.mark.parametrize("at_s", [3.0, 14.0, 22.5, 30.0])
def test_an_engine_that_dies_while_others_go_on_loses_no_rollout(tmp_path, policy, at_s):
    run, found, _ = go(
        tmp_path,
        lambda run: asyncio.get_running_loop().call_later(at_s, run.engines[0].kill, "power cut"),
        policy=policy,
        engines=3,
        trainer=Watching(),
    )
    assert len(run.record.steps) == 6
    assert len(found) == 6 * 9
    assert run.loop.pool.census.dropped == {}
    if policy.freshness.max_staleness is not None:
        assert all(version - min(versions) <= 1 for version, versions, _ in found.values())


def test_an_engine_that_does_not_answer_an_update_is_out_and_the_others_go_on(tmp_path):
    run, _, ended = go(
        tmp_path,
        lambda run: asyncio.get_running_loop().call_later(14.0, run.engines[1].hang),
        policy=WINDOWED,
        engines=3,
        timeout_s=60.0,
        stall_s=100.0,
    )
    assert [event["engine"] for event in run.kinds("error")] == ["e1"]
    assert len(run.record.steps) == 6
    assert ended < 1000
